"""Where the CPU time of a gateway's start goes: the interpreter, imports, and the rest up to the ready line.

    python -c pass ─▶ import perilune_gateway.main ─▶ perilune-gateway, until it prints that it is ready

Each is started `STARTS` times, in turn with the others, and the lowest of its CPU times counts, user and
system. CPU time depends little on what else a machine does; the seconds that pass do, and on a machine with a
free core they are about as many, and up to WARM_S more for engines that are slow to tell what they cache.
Python's own report (-X importtime) shares the imports out among packages. All have bytecode of their sources,
as the images have; where Python may not write any, each start compiles the sources again.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from time import monotonic
from typing import NamedTuple

import bars
import pytest
from gateway_processes import cpu_s

from perilune_gateway.served_pool import WARM_S
from perilune_lab.vocabulary import Vocabulary, write_tokenizer

STARTS = 5
ENDPOINTS = 8
BACK_WITHIN_S = 3.0
"""A gateway that is replaced is to be back after so long on a free core."""
SHOWN = 8
IMPORTS = "import gc; gc.disable(); import perilune_gateway.main"
"""As `perilune-gateway` imports it."""
KUBERNETES = f"{IMPORTS}, kubernetes.aio.client"
COMPILED = f"""{IMPORTS}, sys
for name, module in list(sys.modules.items()):
    if name.startswith("perilune_"):
        compile(open(module.__file__).read(), module.__file__, "exec")
"""
"""What a start does besides where there is no bytecode of ours."""
WITH_BYTECODE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")
"""A line of Python's report: own µs, and the module."""


class Took(NamedTuple):
    cpu_s: float
    wall_s: float


def of_code(code: str) -> Took:
    """Run this Python code, without what the interpreter does at its end."""
    began = monotonic()
    code += "\nimport os\nos._exit(0)"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-P", "-c", code], WITH_BYTECODE)
    _, status, used = os.wait4(pid, 0)
    assert status == 0
    return Took(used.ru_utime + used.ru_stime, monotonic() - began)


def of_gateway(pool: Path) -> Took:
    """Start a gateway, and kill it once it is ready."""
    began = monotonic()
    command = [sys.executable, "-P", "-m", "perilune_gateway", "--pool", str(pool)]
    command += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=WITH_BYTECODE) as gateway:
        try:
            assert gateway.stdout is not None
            assert gateway.stdout.readline().startswith("perilune-gateway ready")
            return Took(cpu_s(gateway.pid), monotonic() - began)
        finally:
            gateway.kill()


def write_pool(folder: Path, tokenizer: str = "") -> Path:
    """Write a pool of engines of which none runs, which announce nothing. With a `tokenizer`, prompts are
    tokenized here."""
    model = {"name": "m", **({"tokenizer": tokenizer} if tokenizer else {"tokenize": "estimate"})}
    addresses = [{"address": f"127.0.0.1:{port}"} for port in range(2, 2 + ENDPOINTS)]
    pool = {
        "apiVersion": "perilune.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "bench"},
        "spec": {"model": model, "endpoints": addresses},
    }
    file = folder / f"pool-{'local' if tokenizer else 'estimate'}.yaml"
    file.write_text(json.dumps(pool))
    return file


def packages() -> Counter[str]:
    """Return the share of each package in the imports; Python's own modules are one."""
    command = [sys.executable, "-P", "-X", "importtime", "-c", IMPORTS]
    report = subprocess.run(command, capture_output=True, text=True, check=True, env=WITH_BYTECODE)
    found: Counter[str] = Counter()
    for own_us, module in IMPORTED.findall(report.stderr):
        package = module.partition(".")[0]
        found["Python's own" if package in sys.stdlib_module_names else package] += int(own_us)
    return Counter({package: us / found.total() for package, us in found.items()})


def document(took: dict[str, Took], shares: Counter[str]) -> str:
    bare, imported, ready = (took[name] for name in ("interpreter", "imports", "gateway"))
    imports_s = imported.cpu_s - bare.cpu_s
    rows = [
        ("the interpreter", bare.cpu_s),
        ("imports", imports_s),
        *((f"… {package}", share * imports_s) for package, share in shares.most_common(SHOWN)),
        ("settings, the pool, its parts, ports", ready.cpu_s - imported.cpu_s),
        ("**until it is ready**", ready.cpu_s),
        ("with a local tokenizer", took["tokenizer"].cpu_s),
        ("in Kubernetes, more", took["kubernetes"].cpu_s - imported.cpu_s),
        ("without bytecode of ours, more", took["compiled"].cpu_s - imported.cpu_s),
    ]
    text = (
        f"{bars.machine()}. CPU time of a gateway's start, user and system, lowest of {STARTS} starts: a pool"
        f" of {ENDPOINTS} engines, tokens estimated or by a small local tokenizer. {ready.wall_s:.1f} s"
        f" passed until it was ready. It waits {WARM_S:g} s at most for what engines announce, so a gateway"
        f" that is replaced is back within {BACK_WITHIN_S:g} s if its start needs less than the rest, on a"
        " core of its own."
    )
    limit = bars.Bar("CPU until ready", ready.cpu_s, BACK_WITHIN_S - WARM_S, "s")
    table = ["| part of the start | CPU s |", "|---|---:|", *(f"| {name} | {s:.2f} |" for name, s in rows)]
    return "\n".join(["## A gateway's start", "", fill(text, 110), "", *table, "", bars.table([limit])])


@pytest.mark.bench
def test_a_gateways_start(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder, Vocabulary())
    estimates, local = write_pool(tmp_path), write_pool(tmp_path, str(folder))
    measured: dict[str, Callable[[], Took]] = {
        "interpreter": lambda: of_code("pass"),
        "imports": lambda: of_code(IMPORTS),
        "kubernetes": lambda: of_code(KUBERNETES),
        "compiled": lambda: of_code(COMPILED),
        "gateway": lambda: of_gateway(estimates),
        "tokenizer": lambda: of_gateway(local),
    }
    of_gateway(local)  # writes bytecode where there is none
    starts = [{name: one() for name, one in measured.items()} for _ in range(STARTS)]
    took = {
        name: Took(*(min(column) for column in zip(*(start[name] for start in starts), strict=True)))
        for name in measured
    }
    bars.publish(request, "start", document(took, packages()))

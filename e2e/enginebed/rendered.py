"""An InferencePool as the operator renders it, made to run on this machine.

    spec (a test's words, `asked` adds what this machine needs)
      └▶ the operator's plan ─▶ `Rendered`: containers of engine and master, Mooncake's client configuration
                                └▶ `local`: command and environment of one process here

`DIFFERENCES` lists everything in which an engine here differs from one in a cluster, and all that makes
it differ.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from msgspec import structs

from enginebed.install import Device, Environment
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.document import pool_document
from perilune_api.pool import EndpointSpec, NodePlace, Pool, Topology, dump, parse
from perilune_operator.kinds import full_name
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render import engine_tls
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
POOL, NAMESPACE = "real", "default"
MASTER = f"{POOL}-master.{NAMESPACE}.svc"
NICE = 10
"""What engines and master add to their niceness."""


class Where(StrEnum):
    FIELD = "field"
    """The pool asks for something else than the default."""
    ARGUMENT = "argument"
    """The pool asks for it in engine.args."""
    VARIABLE = "variable"
    """The pool asks for it in engine.env."""
    PATH = "path"
    """An environment variable of the operator's names a path that is elsewhere here."""
    ADDED = "added"
    """A further environment variable."""
    CLUSTER = "cluster"
    """What Kubernetes does."""


BOTH = frozenset(Device)
CPU = frozenset({Device.CPU})


@dataclass(frozen=True, slots=True)
class Difference:
    where: Where
    name: str
    here: Any
    why: str
    devices: frozenset[Device] = BOTH


DIFFERENCES = (
    Difference(Where.FIELD, "engine.blockSize", 32, "attention on a CPU has blocks of multiples of 32", CPU),
    Difference(Where.FIELD, "mooncake.store.segmentSize", "64Mi", "a small machine"),
    Difference(Where.FIELD, "mooncake.store.localBufferSize", "32Mi", "a small machine"),
    Difference(Where.ARGUMENT, "--enforce-eager", "", "torch.compile takes a compiler, and minutes"),
    Difference(Where.ARGUMENT, "--max-num-seqs", "16", "a small machine"),
    Difference(Where.ARGUMENT, "--gpu-memory-utilization", "0.1", "engines share memory, of CPU or GPU"),
    Difference(Where.VARIABLE, "VLLM_CPU_OMP_THREADS_BIND", "nobind", "engines share the cores", CPU),
    Difference(Where.VARIABLE, "OMP_NUM_THREADS", "1", "engines share the cores", CPU),
    Difference(Where.VARIABLE, "HF_HUB_OFFLINE", "1", "the models are files here"),
    Difference(Where.VARIABLE, "DO_NOT_TRACK", "1", "nothing outside can be reached"),
    Difference(Where.PATH, "HOME", "{folder}", "no container"),
    Difference(Where.PATH, "MOONCAKE_CONFIG_PATH", "{folder}/mooncake.json", "no container"),
    Difference(Where.ADDED, "TMPDIR", "{scratch}", "no container: engines would share sockets in /tmp"),
    Difference(
        Where.ADDED,
        "VLLM_CACHE_ROOT",
        "{cache}",
        "each engine has a new home here: what vLLM knows of models' classes is kept, and starts are shorter",
    ),
    Difference(
        Where.ADDED,
        "TORCHINDUCTOR_CACHE_DIR",
        "{cache}/inductor",
        "as above: the kernels that each start compiles are kept",
    ),
    Difference(
        Where.ADDED,
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS",
        "0",
        "precompiled headers lie in TMPDIR: first log probabilities would take 10 s",
        CPU,
    ),
    Difference(
        Where.ADDED,
        "PYTHONPATH",
        "{folder}:{plugins}",
        "no container; a plugin where there is no accelerator, which also lets processes sleep",
    ),
    Difference(Where.CLUSTER, "DNS", "a hosts file", "the master's Service has no name server here"),
    Difference(
        Where.CLUSTER, "Secret of engine.tls", "a folder", "no kubelet: the test writes and renews it"
    ),
    Difference(
        Where.CLUSTER, "resources, probes, preStop", "none", "no kubelet: the test starts, asks and kills"
    ),
    Difference(Where.CLUSTER, "nice", NICE, "the gateway and Envoy have no cores of their own here"),
)


def table(environment: Environment) -> str:
    """Return the differences, for people."""
    rows = [("what", "name", "here", "why")]
    rows += [
        (each.where, each.name, str(each.here), each.why)
        for each in DIFFERENCES
        if environment.device in each.devices
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def asked(spec: Mapping[str, Any], environment: Environment) -> Object:
    """Return the pool's spec with what this machine needs; what the spec says itself stays."""
    made = deepcopy(dict(spec))
    engine = made.setdefault("engine", {})
    given = {str(arg).partition("=")[0] for arg in engine.get("args", ())}
    variables = {variable["name"] for variable in engine.get("env", ())}
    for each in _of(environment, Where.FIELD):
        *folders, name = each.name.split(".")
        at = made
        for folder in folders:
            at = at.setdefault(folder, {})
        at.setdefault(name, each.here)
    arguments = [each for each in _of(environment, Where.ARGUMENT) if each.name not in given]
    engine["args"] = [
        *(f"{each.name}={each.here}" if each.here else each.name for each in arguments),
        *engine.get("args", ()),
    ]
    engine["env"] = [
        *(
            {"name": each.name, "value": each.here}
            for each in _of(environment, Where.VARIABLE)
            if each.name not in variables
        ),
        *engine.get("env", ()),
    ]
    return made


def _of(environment: Environment, *where: Where) -> Iterable[Difference]:
    return (each for each in DIFFERENCES if each.where in where and environment.device in each.devices)


@dataclass(frozen=True, slots=True)
class Container:
    command: tuple[str, ...]
    env: tuple[Object, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """What the operator makes of the pool, as far as it runs here."""

    engine: Container
    master: Container | None
    store_client: str
    """Mooncake's client configuration; empty without a store."""
    document: Pool
    """The pool document without endpoints."""
    worker: Container | None = None
    """The further pods of an engine that spans nodes."""

    def with_transfer(self, config: Object) -> "Rendered":
        """Return the same with this connector (vLLM's --kv-transfer-config) in place of the operator's."""
        return self.with_option("--kv-transfer-config", json.dumps(config))

    def with_buffer(self, steps: int) -> "Rendered":
        """Return the same with engines that can replay only that many messages of KV events."""
        flag = "--kv-events-config="
        (said,) = (word for word in self.engine.command if word.startswith(flag))
        events = json.loads(said.removeprefix(flag)) | {"buffer_steps": steps}
        return self.with_option("--kv-events-config", json.dumps(events))

    def with_option(self, flag: str, value: str) -> "Rendered":
        """Return the same with engines that get this option, which the operator would not give them."""
        kept = tuple(word for word in self.engine.command if not word.startswith(f"{flag}="))
        return replace(self, engine=replace(self.engine, command=(*kept, f"{flag}={value}")))

    def with_endpoints(self, addresses: Sequence[str], workers: Sequence[str] = ()) -> Pool:
        """Return the document that a gateway of these engines (IP addresses) would make for itself from their
        pods. Each engine is on a node of its own; racks have two nodes. `workers`: of one engine that spans
        nodes, the addresses of its further pods, which have equal numbers of its ranks."""
        env = {variable["name"]: variable.get("value", "") for variable in self.engine.env}
        bootstrap = env.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", "")
        flag = "--data-parallel-size="
        ranks = next((int(w.removeprefix(flag)) for w in self.engine.command if w.startswith(flag)), 1)

        def at(address: str, rank: int) -> str:
            return (address, *workers)[rank * (1 + len(workers)) // ranks]

        endpoints = tuple(
            EndpointSpec(
                address=f"{address}:8000",
                node=f"node-{i}",
                events=tuple(f"tcp://{at(address, rank)}:{5557 + rank}" for rank in range(ranks)),
                replay=tuple(f"tcp://{at(address, rank)}:{5557 + ranks + rank}" for rank in range(ranks)),
                bootstrap=f"{address}:{bootstrap}" if bootstrap else "",
            )
            for i, address in enumerate(addresses)
        )
        nodes = {f"node-{i}": NodePlace(f"rack-{i // 2}", "spine-0") for i in range(len(addresses))}
        spec = structs.replace(self.document.spec, endpoints=endpoints, topology=Topology(nodes))
        return parse(dump(structs.replace(self.document, spec=spec)))  # checked as a user's is


def render(spec: Object) -> Rendered:
    """Return what the operator renders. Raises SpecError for a spec that the operator refuses."""
    checked = convert(spec)
    seen = Observed(uid="uid", generation=1, kinds=frozenset({full_name("LeaderWorkerSet")}))
    made = plan(POOL, NAMESPACE, checked, seen, 0.0, Defaults())
    if made.objects is None:
        raise AssertionError(made.status)
    by_kind = {(o["kind"], o["metadata"]["name"]): o for o in made.objects}
    master = by_kind.get(("Deployment", f"{POOL}-master"))
    config = by_kind.get(("ConfigMap", f"{POOL}-mooncake"))
    found = [
        o for (kind, _), o in by_kind.items() if kind == "Deployment" and _container(o, "engine") is not None
    ]
    worker = None
    if group := by_kind.get(("LeaderWorkerSet", f"{POOL}-engine")):
        templates = group["spec"]["leaderWorkerTemplate"]
        found = [{"spec": {"template": templates["leaderTemplate"]}}]
        worker = _container({"spec": {"template": templates["workerTemplate"]}}, "engine")
    (engine,) = found
    return Rendered(
        _read(_container(engine, "engine")),
        _read(_container(master, "master")) if master else None,
        config["data"]["mooncake.json"] if config else "",
        pool_document(POOL, NAMESPACE, checked, Topology()),
        _read(worker) if worker else None,
    )


def _container(deployment: Object, name: str) -> Object | None:
    containers: list[Object] = deployment["spec"]["template"]["spec"]["containers"]
    return next((c for c in containers if c["name"] == name), None)


def _read(container: Object | None) -> Container:
    assert container is not None
    return Container((*container["command"], *container.get("args", ())), tuple(container.get("env", ())))


def local(
    container: Container,
    environment: Environment,
    fields: Mapping[str, str],
    places: Mapping[str, str],
    group: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a container's process here. `fields`: what a fieldRef reads, by its path;
    `places`: what the table's paths name in braces, and the folder of engines' certificates (`tls`); `group`:
    the variables that a LeaderWorkerSet's controller puts before all others."""
    env: dict[str, str] = dict(group or {})
    for variable in container.env:
        source = variable.get("valueFrom")
        secret = source.get("secretKeyRef", {}) if source else {}
        if secret.get("optional"):
            continue  # there is no such Secret here, so a cluster would leave it unset too
        if secret:
            value = f"{secret['name']}/{secret['key']}"
        else:
            value = fields[source["fieldRef"]["fieldPath"]] if source else variable.get("value", "")
        env[variable["name"]] = _expand(value, env)
    for each in _of(environment, Where.PATH, Where.ADDED):
        if each.where is Where.ADDED or each.name in env:
            env[each.name] = each.here.format(**places)
    env = {name: value.replace(engine_tls.FOLDER, places["tls"]) for name, value in env.items()}
    words = (word.replace(engine_tls.FOLDER, places["tls"]) for word in container.command)
    program, *arguments = (_expand(word, env) for word in words)
    return [environment.program(program), *arguments], env


def _expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes replaces it."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)

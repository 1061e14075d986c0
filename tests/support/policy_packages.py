"""Packages that bring policies, as pip would install them: a module, and metadata with its entry points.

with installed(tmp_path, MINE):                      # `mine`, for POLICIES and every command
    ...
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from perilune_gateway.policy import POLICIES

MINE = '''
    from typing import Annotated

    from msgspec import Meta

    from perilune_gateway.policy.contract import (
        Decision, OutsidePolicy, Parameters, Reason, host_of, least_pending, pending_costs,
    )


    class MineParameters(Parameters, frozen=True):
        """Parameters of mine."""

        gain_tokens: Annotated[int, Meta(ge=0)] = 1000
        """Pending tokens that a move must save."""
        longest_gain: int = 100_000

        def __post_init__(self):
            if self.gain_tokens > self.longest_gain:
                raise ValueError("gainTokens is above longestGain: lower it")


    def decide(request, candidates, parameters, rng):
        """Choose the host, unless another endpoint has fewer pending tokens by gain_tokens."""
        best, host = least_pending(candidates, rng), host_of(request, candidates)
        costs = pending_costs(candidates)
        if host is None:
            return Decision(best.address, Reason.COLD, costs)
        saved = host.load.pending_prefill_tokens - best.load.pending_prefill_tokens
        if best is host or saved <= parameters.gain_tokens:
            return Decision(host.address, Reason.HOST, costs)
        return Decision(best.address, Reason.MOVED, costs, moved_from=host.address)


    policy = OutsidePolicy(decide=decide, parameters=MineParameters, contract=1)
'''
"""A policy with parameters, whose entry point is `mine`."""


def answering(expression: str) -> str:
    """Return a module whose policy answers with this expression of request, candidates and rng."""
    return f"""
    import math
    from asyncio import CancelledError
    from fractions import Fraction

    from perilune_gateway.model import *
    from perilune_gateway.policy.contract import *

    Float, Text = type("Float", (float,), {{}}), type("Text", (str,), {{}})


    def raised(error):
        raise error


    def decide(request, candidates, parameters, rng):
        return {expression}


    policy = OutsidePolicy(decide=decide, contract=1)
"""


def install(
    folder: Path, source: str, name: str = "mine", *, package: str = "my-policies", value: str = ""
) -> None:
    """Write a package with one policy into a folder that is, or will be, on Python's path."""
    module = f"{package.replace('-', '_')}_{name}"
    (folder / f"{module}.py").write_text(dedent(source))
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    entries = info / "entry_points.txt"
    head = entries.read_text() if entries.exists() else "[perilune.policies]\n"
    entries.write_text(f"{head}{name} = {value or f'{module}:policy'}\n")


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Let the packages in a folder be installed."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    POLICIES.look_again()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
        POLICIES.look_again()


@contextmanager
def installed(folder: Path, source: str, name: str = "mine") -> Iterator[None]:
    """Let a package with one policy be installed."""
    install(folder, source, name)
    with on_path(folder):
        yield

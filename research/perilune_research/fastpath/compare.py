"""Compares the decisions on one turn from its headers and from its body, and finds why they differ.

The result is one of

- *read*: the headers did not suffice, so the gateway reads the body, and there is only one decision;
- *equal*: both decisions name the same endpoint, or both are the same refusal;
- *different*, with a cause: the fact whose correction makes the decisions equal (`Cause`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from msgspec.structs import replace

from perilune_gateway.model import (
    NO_PREFIX,
    Candidate,
    Decision,
    Location,
    NeedBody,
    Overlap,
    Phase,
    Prefix,
    Refusal,
    Verdict,
)
from perilune_gateway.routing.decide import decide
from perilune_research.fastpath.rig import Pair

_EXAMPLES = 5
"""Number of differences that are printed in full."""


class Cause(StrEnum):
    """The fact that the gateway must guess if it reads the headers only."""

    TOKENS = "tokens"
    """The length of the prompt."""
    HOST_HOLDS = "host_holds"
    """The tokens of the prompt that the session's host holds."""
    OTHERS_HOLD = "others_hold"
    """The tokens of the prompt that other endpoints hold."""
    BODY = "body"
    """Anything else that a body says."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts the results of one policy's turns."""

    policy: str
    turns: int = 0
    read: int = 0
    """Turns whose headers did not suffice."""
    equal: int = 0
    """Turns that the headers decided as the body did."""
    different: Counter[tuple[Cause, str]] = field(default_factory=Counter)
    """Turns that they decided differently, by cause and `header's reason → body's reason`."""
    examples: list[str] = field(default_factory=list)
    token_errors: list[float] = field(default_factory=list)
    """|estimated − true| / true prompt tokens, of each turn that the headers decided."""
    held_errors: list[float] = field(default_factory=list)
    """|estimated − true| tokens that the session's host holds / true prompt tokens, of each such turn."""

    @property
    def by_headers(self) -> int:
        """Turns that the headers decided."""
        return self.turns - self.read

    @property
    def same_share(self) -> float:
        """Share of all turns with the same decision; those whose body is read count as the same."""
        return (self.read + self.equal) / self.turns if self.turns else 1.0

    @property
    def equal_share(self) -> float:
        """Share of the turns decided by the headers whose decisions are equal."""
        return self.equal / self.by_headers if self.by_headers else 1.0

    def add(self, pair: Pair) -> None:
        """Count one turn."""
        self.turns += 1
        (_, view, verdict), (_, full, other) = pair.by_headers, pair.by_body
        if isinstance(verdict, NeedBody):
            self.read += 1
            return
        host = full.session.host if full.session else ""
        self.token_errors.append(abs(view.prompt_tokens - full.prompt_tokens) / full.prompt_tokens)
        held, truly = (_host_holds(asked.candidates, host) for asked in (pair.by_headers[0], pair.by_body[0]))
        self.held_errors.append(abs(held - truly) / full.prompt_tokens)
        if _target(verdict) == _target(other):
            self.equal += 1
            return
        cause = cause_of(pair)
        self.different[cause, f"{_reason(verdict)} → {_reason(other)}"] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(
                f"{cause}: {_reason(verdict)} {_target(verdict)} → {_reason(other)} {_target(other)}; prompt"
                f" {view.prompt_tokens} / {full.prompt_tokens} tokens, host {host} holds {held} / {truly}"
            )


def cause_of(pair: Pair) -> Cause:
    """Return why the decisions differ: corrects one fact after the other until they are equal, and return the
    last one."""
    (asked, view, _), (full_asked, full, other) = pair.by_headers, pair.by_body
    host = full.session.host if full.session else ""
    right = _target(other)
    tokens = full.prompt_tokens

    def equal(holds: Callable[[Candidate], Overlap], prefix: Prefix) -> bool:
        corrected = replace(view, phase=Phase.BODY, prompt_tokens=tokens, prefix=prefix)
        rows = [
            replace(c, overlap=o, prefill_s=c.engine.prefill_s(tokens - o.device_tokens, o.device_tokens))
            for c in asked.candidates
            if (o := holds(c))
        ]
        return _target(decide(corrected, rows, pair.policy, pair.routing, Random(asked.seed))) == right

    truth = {c.address: c.overlap for c in full_asked.candidates}
    most = max(0, (tokens - 1) // view.block_size * view.block_size)
    here = Overlap(*(min(most, held) for held in truth.get(host, Overlap())))
    only_host = Prefix(locations=(Location(host, here.device_tokens),)) if here.device_tokens else NO_PREFIX
    if equal(lambda c: Overlap(*(min(most, held) for held in c.overlap)), view.prefix):
        return Cause.TOKENS
    if equal(lambda c: here if c.address == host else c.overlap, only_host):
        return Cause.HOST_HOLDS
    if equal(lambda c: truth.get(c.address, c.overlap), full.prefix):
        return Cause.OTHERS_HOLD
    return Cause.BODY


def _target(verdict: Verdict) -> str:
    if isinstance(verdict, Decision):
        return verdict.target
    return verdict.reason if isinstance(verdict, Refusal) else "body"


def _reason(verdict: Verdict) -> str:
    return "body" if isinstance(verdict, NeedBody) else verdict.reason.value


def _host_holds(candidates: Iterable[Candidate], host: str) -> int:
    return next((c.overlap.device_tokens for c in candidates if c.address == host), 0)

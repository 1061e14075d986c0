"""Policies that installed packages bring: found by entry points, loaded once, and checked at every decision.

    entry points ─▶ find ─▶ Found: a policy, or why it cannot be used
    request, candidates, parameters, rng ─▶ call ─▶ Verdict, or PolicyError

A package that cannot be loaded, or whose policy has a name that is taken, is left out: `Found.problem` says
what is wrong with it. `call` raises PolicyError for a policy that raises, and for an answer that no gateway
could carry out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint
from math import isfinite
from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import Any

import msgspec

from perilune_api.policies import OUTSIDE_NAME
from perilune_api.pool import SpecError
from perilune_gateway.model import (
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
    RequestView,
    Verdict,
)
from perilune_gateway.policy.contract import VERSION, OutsidePolicy, Parameters

NOT_CHOSEN = frozenset({Reason.PASS_THROUGH, Reason.FORCED, Reason.PLANNED, Reason.REPLICA, Reason.AWAITS_KV})
"""Reasons that only the gateway itself gives."""


class FaultKind(StrEnum):
    """How one call of a policy went wrong."""

    RAISED = "raised"
    """It raised an exception."""
    NONSENSE = "nonsense"
    """Its answer cannot be carried out: an unknown endpoint, a cost that is no number."""
    SLOW = "slow"
    """It took longer than a decision may take. Its answer counts."""


class PolicyError(Exception):
    """A policy of a package did not give an answer that counts."""

    def __init__(self, kind: FaultKind, what: str) -> None:
        """Say `what` is wrong, without anything that a request contains."""
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A policy that a package brings."""

    name: str
    origin: str
    """Package and version, such as `my-policies 1.0`."""
    policy: OutsidePolicy | None = None
    """None if it cannot be used."""
    problem: str = ""
    """Why it cannot be used, and what to do; empty if it can."""


# -- finding ---------------------------------------------------------------------------------------------


def find(entry_points: Iterable[EntryPoint], taken: Collection[str]) -> dict[str, Found]:
    """Return the policies of all entry points by name. `taken`: names that no package may use."""
    named: dict[str, list[EntryPoint]] = {}
    for entry in entry_points:
        named.setdefault(entry.name, []).append(entry)
    return {name: _found(name, entries, taken) for name, entries in sorted(named.items())}


def _found(name: str, entries: Sequence[EntryPoint], taken: Collection[str]) -> Found:
    origins = sorted({_origin(entry) for entry in entries})
    origin, problem, policy = ", ".join(origins), "", None
    if not re.fullmatch(OUTSIDE_NAME, name):
        problem = "a policy's name has small letters, digits and _ only, and begins with a letter: rename it"
    elif name in taken:
        problem = "Perilune has a policy of this name: rename it"
    elif len(origins) > 1:
        problem = "several packages have a policy of this name: uninstall all but one, or rename it"
    else:
        policy, problem = _load(entries[0])
    return Found(name=name, origin=origin, policy=policy, problem=problem)


def _load(entry: EntryPoint) -> tuple[OutsidePolicy | None, str]:
    """Return the policy of an entry point, or None and what is wrong with it."""
    try:
        policy = entry.load()
    except (Exception, SystemExit) as error:
        return None, f"{entry.value} cannot be imported: {type(error).__name__}: {error}"
    if not isinstance(policy, OutsidePolicy):
        return None, f"{entry.value} is no OutsidePolicy, but {type(policy).__name__}: see docs/policies.md"
    if policy.contract != VERSION:
        return None, (
            f"it is written for version {policy.contract} of the contract of policies, and this Perilune has"
            f" version {VERSION}: install the releases that fit each other"
        )
    try:
        if not issubclass(policy.parameters, Parameters):
            return None, f"its parameters are no subclass of {Parameters.__name__}: see docs/policies.md"
        policy.parameters()
    except (TypeError, ValueError) as error:
        return None, f"its parameters lack defaults: {error}: give each field one"
    return policy, ""


def _origin(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist else "an unknown package"


# -- parameters ------------------------------------------------------------------------------------------


def typed(
    name: str, policy: OutsidePolicy, block: Mapping[str, Any], at: str, *, strict: bool = True
) -> Parameters:
    """Return a policy's parameters from its block, whose path is `at`. Not `strict`: texts may stand for
    numbers. Raises SpecError that names the field and says what would be right."""
    try:
        return msgspec.convert(dict(block), policy.parameters, strict=strict)
    except msgspec.ValidationError as error:
        words, _, path = str(error).partition(" - at `$")
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(policy.parameters))
        if "unknown field" in words:
            words += f"; {name} knows {known or 'none'}"
        raise SpecError(f"{words} - at `{at}{path.rstrip('`')}`") from None


# -- deciding --------------------------------------------------------------------------------------------


def call(
    policy: OutsidePolicy,
    request: RequestView,
    candidates: Sequence[Candidate],
    parameters: Parameters,
    rng: Random,
) -> Verdict:
    """Return the policy's verdict. Raises PolicyError."""
    try:
        verdict = policy.decide(request, tuple(candidates), parameters, rng)
    except (Exception, SystemExit) as error:
        raise PolicyError(FaultKind.RAISED, f"{type(error).__name__}{_place(error)}") from error
    try:
        wrong = nonsense(verdict, request, candidates)
    except (TypeError, ValueError, AttributeError) as error:
        wrong = f"an answer with a value of a wrong type ({error})"
    if wrong:
        raise PolicyError(FaultKind.NONSENSE, wrong)
    return verdict


def nonsense(verdict: object, request: RequestView, candidates: Sequence[Candidate]) -> str:
    """Return what is wrong with an answer; empty if it can be carried out."""
    match verdict:
        case Decision():
            return _wrong_decision(verdict, request, {c.address for c in candidates})
        case NeedBody():
            return "" if request.phase is Phase.HEADERS else "NEED_BODY for a body that it has"
        case Refusal():
            known = isinstance(verdict.reason, RefuseReason) and isinstance(verdict.message, str)
            return "" if known and _is_time(verdict.retry_after_s) else "a Refusal with a wrong field"
    return f"{type(verdict).__name__} instead of Decision, Refusal or NEED_BODY"


def _wrong_decision(decision: Decision, request: RequestView, addresses: Collection[str]) -> str:
    host = request.session.host if request.session else ""
    sources = ("", *(location.address for location in request.prefix.locations))
    if decision.target not in addresses:
        return "a target that is no candidate"
    if not isinstance(decision.reason, Reason) or decision.reason in NOT_CHOSEN:
        return "a reason that no policy gives"
    if decision.moved_from and (decision.moved_from != host or decision.target == host):
        return "moved_from, although the session does not leave its host"
    if decision.prefill or decision.move or decision.unsplit or decision.unpulled:
        return "prefill, move, unsplit or unpulled, which the gateway fills in"
    if decision.replicate_from not in sources:
        return "replicate_from that is no location of the prefix"
    if not 0 <= decision.cached_tokens <= request.prompt_tokens:
        return "cached_tokens that are not between 0 and those of the prompt"
    if not (_is_time(decision.estimated_ttft_s) and _is_time(decision.estimated_tpot_s)):
        return "an estimated time that is no number of seconds"
    for cost in decision.costs:
        if not isinstance(cost, Cost) or cost.address not in addresses:
            return "a cost of no candidate"
        if not isfinite(cost.total) or not isfinite(sum(cost.terms.values())):
            return "a cost that is no finite number"
    return ""


def _is_time(seconds: float) -> bool:
    return isfinite(seconds) and seconds >= 0


def _place(error: BaseException) -> str:
    """Return where in its package an exception was raised."""
    frames = extract_tb(error.__traceback__)
    return f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if len(frames) > 1 else ""

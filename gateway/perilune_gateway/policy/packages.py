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
from inspect import signature
from pathlib import Path
from random import Random
from sys import float_info
from traceback import extract_tb, format_exception_only
from types import MappingProxyType
from typing import Any, TypeGuard

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
SURROGATES = re.compile("[\ud800-\udfff]")
"""Characters that UTF-8 does not have."""


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, f"{entry.value} cannot be imported: {_words(error)}"
    if not isinstance(policy, OutsidePolicy):
        return None, f"{entry.value} is no OutsidePolicy, but {type(policy).__name__}: see docs/policies.md"
    problem = _wrong_contract(policy.contract) or _wrong_decide(policy) or _wrong_defaults(policy.parameters)
    return (None if problem else policy), problem


def _wrong_contract(contract: object) -> str:
    if type(contract) is not int:
        return f"its contract is {contract!r:.100}, which is no int: write contract={VERSION}"
    if contract != VERSION:
        return (
            f"it is written for version {contract} of the contract of policies, and this Perilune has"
            f" version {VERSION}: install the releases that fit each other"
        )
    return ""


def _wrong_decide(policy: OutsidePolicy) -> str:
    try:
        signature(policy.decide).bind("request", "candidates", "parameters", "rng")
    except TypeError as error:
        return f"its decide cannot be called with (request, candidates, parameters, rng): {error}"
    except ValueError:  # as some functions written in C, it does not say what it takes
        pass
    return ""


def _wrong_defaults(parameters: object) -> str:
    """Return what is wrong with a policy's parameters. Their defaults are read as those of a document are."""
    if not isinstance(parameters, type):
        return f"its parameters are no class, but a value of {type(parameters).__name__}: name the class"
    if not issubclass(parameters, Parameters):
        return f"its parameters are no subclass of {Parameters.__name__}: see docs/policies.md"
    try:
        msgspec.convert(msgspec.to_builtins(parameters()), parameters)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"its parameters lack defaults that fit: {_words(error)}: give each field one"
    return ""


def _words(error: BaseException) -> str:
    """Return type and message of an exception, whatever its class."""
    return format_exception_only(error)[-1].strip()


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the class's own checks
        raise SpecError(f"{_words(error)} - at `{at}`") from None


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # decide is no coroutine, so that a CancelledError is its own, too
        raise PolicyError(FaultKind.RAISED, f"{type(error).__name__}{_place(error)}") from error
    try:
        wrong = nonsense(verdict, request, candidates)
    except Exception as error:
        wrong = f"an answer with a value of a wrong type ({type(error).__name__})"
    if wrong:
        raise PolicyError(FaultKind.NONSENSE, wrong)
    return verdict


def nonsense(verdict: object, request: RequestView, candidates: Sequence[Candidate]) -> str:
    """Return what is wrong with an answer; empty if it can be carried out, and written to the decision log.
    Types are exact, since the log's encoder knows no subclasses such as numpy.float64."""
    if type(verdict) is Decision:
        return _wrong_decision(verdict, request, {c.address for c in candidates})
    if type(verdict) is Refusal:
        known = type(verdict.reason) is RefuseReason and _is_text(verdict.message)
        return "" if known and _is_time(verdict.retry_after_s) else "a Refusal with a wrong field"
    if type(verdict) is NeedBody:
        return "" if request.phase is Phase.HEADERS else "NEED_BODY for a body that it has"
    return f"{type(verdict).__name__} instead of Decision, Refusal or NEED_BODY"


def _wrong_decision(decision: Decision, request: RequestView, addresses: Collection[str]) -> str:
    host = request.session.host if request.session else ""
    sources = ("", *(location.address for location in request.prefix.locations))
    filled_in = (decision.prefill, decision.move, decision.unsplit, decision.unpulled)
    if not all(map(_is_text, (decision.target, decision.moved_from, decision.replicate_from))):
        return "an address that is no str"
    if decision.target not in addresses:
        return "a target that is no candidate"
    if type(decision.reason) is not Reason or decision.reason in NOT_CHOSEN:
        return "a reason that no policy gives"
    if decision.moved_from and (decision.moved_from != host or decision.target == host):
        return "moved_from, although the session does not leave its host"
    if filled_in != ("", None, None, None):
        return "prefill, move, unsplit or unpulled, which the gateway fills in"
    if decision.replicate_from not in sources:
        return "replicate_from that is no location of the prefix"
    if type(decision.cached_tokens) is not int or not 0 <= decision.cached_tokens <= request.prompt_tokens:
        return "cached_tokens that are no int between 0 and those of the prompt"
    if not (_is_time(decision.estimated_ttft_s) and _is_time(decision.estimated_tpot_s)):
        return "an estimated time that is no number of seconds"
    if type(decision.costs) not in (tuple, list):
        return "costs that are no tuple or list"
    return next(filter(None, (_wrong_cost(cost, addresses) for cost in decision.costs)), "")


def _wrong_cost(cost: object, addresses: Collection[str]) -> str:
    if type(cost) is not Cost or not _is_text(cost.address) or cost.address not in addresses:
        return "a cost of no candidate"
    if type(cost.terms) not in (dict, MappingProxyType) or not all(map(_is_text, cost.terms)):
        return "terms of a cost that are no dict with names"
    if not all(map(_is_number, (cost.total, *cost.terms.values()))):
        return "a cost that is no finite float or int"
    return ""


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number that JSON can have. (An int may be too large for a float.)"""
    return (type(value) is float or type(value) is int) and abs(value) <= float_info.max


def _is_time(seconds: object) -> bool:
    return _is_number(seconds) and seconds >= 0


def _is_text(value: object) -> bool:
    """Return whether a value is a text that UTF-8 can encode."""
    return type(value) is str and (value.isascii() or not SURROGATES.search(value))


def _place(error: BaseException) -> str:
    """Return where in its package an exception was raised."""
    frames = extract_tb(error.__traceback__)
    return f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if len(frames) > 1 else ""

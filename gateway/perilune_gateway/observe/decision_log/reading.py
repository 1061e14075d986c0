"""Reads a decision log: its lines (see lines.py) → decisions as they were made, and how the requests ended.

Columns are found by name. Unknown columns are ignored; missing columns and nulls have their defaults. An
incomplete line of a process that was killed is reported as `Cut` and skipped, if it is the last line or a new
`pool` line follows.

Costs 5 µs for each candidate. The caller opens the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import Routing, SpecError
from perilune_api.topology import Link
from perilune_gateway.model import (
    Candidate,
    Cost,
    Decision,
    DecisionRecord,
    Ending,
    Endpoint,
    EngineModel,
    Load,
    Overlap,
    Reason,
    Refusal,
    RefuseReason,
    RequestView,
    Unpulled,
    Unsplit,
)
from perilune_gateway.observe.decision_log.lines import CANDIDATE, SCHEMA

_T = TypeVar("_T")
_SHAPE_ERRORS = (AttributeError, TypeError, ValueError, OverflowError)
"""Errors that a row or a cell of a wrong shape raises."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A decision as it was made. It has only the totals of costs, no message of a refusal, and only the
    source of a planned move."""

    number: int
    record: DecisionRecord
    routing: Routing
    """The routing of the pool document at that time; `record.policy` names the policy."""

    @property
    def decided_by(self) -> Routing:
        """The routing with the policy that decided, and its parameters: the canary's, if it was."""
        canary = self.routing.canary
        if not self.record.canary or canary is None:
            return self.routing
        return msgspec.structs.replace(self.routing, policy=canary.policy)


class Ended(NamedTuple):
    """How the request of the decision with that number ended. Numbers start again with every gateway
    process."""

    number: int
    ending: Ending


class Cut(NamedTuple):
    """Number of an incomplete line, such as the last one of a gateway that was killed."""

    line: int


class _PoolLine(msgspec.Struct):
    schema: Literal["perilune.decisions/v2"]
    routing: Routing
    columns: dict[str, tuple[str, ...]]


class _VerdictLine(msgspec.Struct, kw_only=True):
    target: str
    reason: Reason
    costs: dict[str, float] = {}
    moved_from: str = ""
    prefill: str = ""
    replicate_from: str = ""
    unsplit: Unsplit | None = None
    unpulled: Unpulled | None = None
    cached_tokens: int = 0
    estimated_ttft_s: float = 0.0
    estimated_tpot_s: float = 0.0


class _DecisionLine(msgspec.Struct, kw_only=True):
    n: int
    time: float
    tenant: str
    policy: str
    seed: int
    view: dict[str, Any]
    candidates: tuple[tuple[Any, ...], ...]
    excluded: dict[str, str]
    verdict: dict[str, Any]
    destinations: tuple[str, ...]
    cached_tokens: int
    timings_us: dict[str, float]
    canary: bool = False


def read(lines: Iterable[bytes], name: str) -> Iterator[Logged | Ended | Cut]:
    """Yield the entries of one file, in order. Raises SpecError with file and line for an invalid log."""
    reader = _Reader()
    cut = 0  # number of the last line, when it was incomplete
    for number, line in enumerate(lines, 1):
        try:
            values = msgspec.json.decode(line)
        except UNREADABLE as error:
            if cut:
                raise SpecError(f"{name}: line {cut} is not JSON: {error}") from None
            cut = number
            continue
        if cut:
            if not isinstance(values, dict) or values.get("kind") != "pool":
                raise SpecError(f"{name}: line {cut} is not JSON, and no `pool` line follows it")
            yield Cut(cut)
            cut = 0
        try:
            found = reader.take(values)
        except (SpecError, msgspec.ValidationError) as error:
            raise SpecError(f"{name}: line {number}: {error}") from None
        except _SHAPE_ERRORS as error:
            raise SpecError(f"{name}: line {number} does not match {SCHEMA}: {error}") from None
        if found is not None:
            yield found
    if cut == 1:
        raise SpecError(f"{name}: line 1 is not JSON, and no other line follows it")
    if cut:
        yield Cut(cut)


class _Reader:
    """Reads lines with what earlier lines defined."""

    def __init__(self) -> None:
        self._pool: _PoolLine | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._engines: dict[int, EngineModel] = {}

    def take(self, values: Any) -> Logged | Ended | None:
        """Read one line's values. Raises SpecError, or msgspec.ValidationError."""
        if not isinstance(values, dict):
            raise SpecError("it is not an object")
        kind = values.pop("kind", None)
        if kind == "pool":
            if values.get("schema") != SCHEMA:
                raise SpecError(f"its schema is {values.get('schema')!r}, only {SCHEMA} can be read")
            self._pool = msgspec.convert(values, _PoolLine)
            self._endpoints.clear()
            self._engines.clear()
            return None
        if self._pool is None:
            raise SpecError(
                f"no `pool` line with {SCHEMA} comes before it; is this a gateway's --decision-log?"
            )
        match kind:
            case "endpoint":
                self._endpoints[values.pop("id", -1)] = _convert(values, Endpoint)
            case "engine":
                self._engines[values.pop("id", -1)] = _convert(values, EngineModel)
            case "decision":
                return self._decision(msgspec.convert(values, _DecisionLine), self._pool)
            case "end":
                return Ended(values.pop("n", -1), _convert(values, Ending))
            case "handoff":
                return None
            case _:
                raise SpecError(f"unknown kind {kind!r}")
        return None

    def _decision(self, line: _DecisionLine, pool: _PoolLine) -> Logged:
        record = DecisionRecord(
            view=_convert(line.view, RequestView),
            verdict=_read_verdict(line.verdict),
            policy=line.policy,
            candidates=tuple(self._candidate(row, pool.columns) for row in line.candidates),
            excluded=line.excluded,
            destinations=line.destinations,
            cached_tokens=line.cached_tokens,
            timings_us=line.timings_us,
            time=line.time,
            tenant=line.tenant,
            seed=line.seed,
            canary=line.canary,
        )
        return Logged(line.n, record, pool.routing)

    def _candidate(self, row: Sequence[Any], columns: Mapping[str, Sequence[str]]) -> Candidate:
        named = _named(columns.get("candidate", CANDIDATE), row)
        endpoint = self._endpoints.get(named.pop("endpoint", -1))
        engine = self._engines.get(named.pop("engine", -1))
        if endpoint is None or engine is None:
            raise SpecError("it names an endpoint or engine that no earlier line defines")
        load = _values(columns.get("load", ()), named.pop("load", ()), Load)
        overlap = _values(columns.get("overlap", ()), named.pop("overlap", ()), Overlap)
        links = {
            address: _values(columns.get("link", ()), link, Link)
            for address, link in named.pop("links", {}).items()
        }
        plain = {name: float(value) for name, value in named.items() if name in CANDIDATE}
        return Candidate(endpoint=endpoint, load=load, overlap=overlap, links=links, engine=engine, **plain)


def _named(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return the cells of a row by column, without nulls."""
    if len(columns) != len(row):
        raise SpecError(f"a row has {len(row)} values for the {len(columns)} columns {', '.join(columns)}")
    return {name: value for name, value in zip(columns, row, strict=True) if value is not None}


def _values(columns: Sequence[str], row: Sequence[Any], kind: type[_T]) -> _T:
    """Return a named tuple from a row, with checked types."""
    fields: Sequence[str] = kind._fields  # type: ignore[attr-defined]
    if columns == fields and None not in row:
        return msgspec.convert(row, kind)
    named = _named(columns, row)
    defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    return msgspec.convert([named[f] if f in named else defaults.get(f) for f in fields], kind)


def _convert(values: Any, kind: type[_T]) -> _T:
    """Convert with checked types. Nulls and missing fields have the field's default."""
    return msgspec.convert(_without_nulls(values), kind)


def _without_nulls(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _without_nulls(value) for name, value in values.items() if value is not None}
    return values


def _read_verdict(values: dict[str, Any]) -> Decision | Refusal:
    if "refused" in values:
        return Refusal(RefuseReason(values["refused"]), "", values.get("retry_after_s", 0.0))
    line = _convert(values, _VerdictLine)
    return Decision(
        line.target,
        line.reason,
        tuple(Cost(address, total, {}) for address, total in line.costs.items()),
        moved_from=line.moved_from,
        prefill=line.prefill,
        unsplit=line.unsplit,
        unpulled=line.unpulled,
        replicate_from=line.replicate_from,
        cached_tokens=line.cached_tokens,
        estimated_ttft_s=line.estimated_ttft_s,
        estimated_tpot_s=line.estimated_tpot_s,
    )

"""A decision log read back: its lines (see lines.py) → decisions as they were taken, and how they ended.

Columns are found by name: one that is not known is ignored, one that is missing has its default, and so has
what is null. A line cut by the end of its process is told and skipped, if a new start follows.

Costs 5 µs a candidate. Does not: open files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

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
)
from perilune_gateway.observe.decision_log.lines import CANDIDATE, SCHEMA

_T = TypeVar("_T")
_MISSHAPEN = (AttributeError, TypeError, ValueError, OverflowError)
"""What a row or a cell of another shape raises."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A decision as it was taken. Of its costs only the totals, of a refusal no message, of a planned move
    only where from."""

    number: int
    record: DecisionRecord
    routing: Routing
    """In force then; the policy is the record's own."""


class Ended(NamedTuple):
    """How the decision of that number ended; numbers begin anew with every gateway's start."""

    number: int
    ending: Ending


class Cut(NamedTuple):
    """A line that was not written to its end, as happens to the last one of a gateway that was killed."""

    line: int


class _PoolLine(msgspec.Struct):
    schema: Literal["perilune.decisions/v2"]
    routing: Routing
    columns: dict[str, tuple[str, ...]]


class _VerdictLine(msgspec.Struct):
    target: str
    reason: Reason
    costs: dict[str, float] = {}
    moved_from: str = ""
    replicate_from: str = ""
    cached_tokens: int = 0
    estimated_ttft_s: float = 0.0
    estimated_tpot_s: float = 0.0


class _DecisionLine(msgspec.Struct):
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


def read(lines: Iterable[bytes], name: str) -> Iterator[Logged | Ended | Cut]:
    """The lines of one file, in their order. Raises SpecError with file and line for what is no such log."""
    reader, cut = _Reader(), 0
    for number, line in enumerate(lines, 1):
        try:
            values = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if cut:
                raise SpecError(f"{name}: line {cut} is no JSON: {error}") from None
            cut = number
            continue
        if cut:
            if not isinstance(values, dict) or values.get("kind") != "pool":
                raise SpecError(f"{name}: line {cut} is no JSON, and no restart follows it")
            yield Cut(cut)
            cut = 0
        try:
            found = reader.take(values)
        except (SpecError, msgspec.ValidationError) as error:
            raise SpecError(f"{name}: line {number}: {error}") from None
        except _MISSHAPEN as error:
            raise SpecError(f"{name}: line {number} is not as {SCHEMA} says: {error}") from None
        if found is not None:
            yield found
    if cut == 1:
        raise SpecError(f"{name}: line 1 is no JSON, and no other follows it")
    if cut:
        yield Cut(cut)


class _Reader:
    """What lines so far said."""

    def __init__(self) -> None:
        self._pool: _PoolLine | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._engines: dict[int, EngineModel] = {}

    def take(self, values: Any) -> Logged | Ended | None:
        """One line's values. Raises SpecError, or msgspec.ValidationError."""
        if not isinstance(values, dict):
            raise SpecError("it is no object")
        kind = values.pop("kind", None)
        if kind == "pool":
            if values.get("schema") != SCHEMA:
                raise SpecError(f"its schema is {values.get('schema')!r}, only {SCHEMA} can be read")
            self._pool = msgspec.convert(values, _PoolLine)
            self._endpoints.clear()
            self._engines.clear()
            return None
        if self._pool is None:
            raise SpecError(f"no {SCHEMA} begins before it; is this a gateway's --decision-log?")
        match kind:
            case "endpoint":
                self._endpoints[values.pop("id", -1)] = _convert(values, Endpoint)
            case "engine":
                self._engines[values.pop("id", -1)] = _convert(values, EngineModel)
            case "decision":
                return self._decision(msgspec.convert(values, _DecisionLine), self._pool)
            case "end":
                return Ended(values.pop("n", -1), _convert(values, Ending))
            case _:
                raise SpecError(f"unknown kind {kind!r}")
        return None

    def _decision(self, line: _DecisionLine, pool: _PoolLine) -> Logged:
        record = DecisionRecord(
            _convert(line.view, RequestView),
            _read_verdict(line.verdict),
            line.policy,
            tuple(self._candidate(row, pool.columns) for row in line.candidates),
            line.excluded,
            line.destinations,
            line.cached_tokens,
            line.timings_us,
            line.time,
            line.tenant,
            seed=line.seed,
        )
        return Logged(line.n, record, pool.routing)

    def _candidate(self, row: Sequence[Any], columns: Mapping[str, Sequence[str]]) -> Candidate:
        named = _named(columns.get("candidate", CANDIDATE), row)
        endpoint = self._endpoints.get(named.pop("endpoint", -1))
        engine = self._engines.get(named.pop("engine", -1))
        if endpoint is None or engine is None:
            raise SpecError("it names an endpoint or engine that no line before it describes")
        load = _values(columns.get("load", ()), named.pop("load", ()), Load)
        overlap = _values(columns.get("overlap", ()), named.pop("overlap", ()), Overlap)
        links = {
            address: _values(columns.get("link", ()), link, Link)
            for address, link in named.pop("links", {}).items()
        }
        plain = {name: float(value) for name, value in named.items() if name in CANDIDATE}
        return Candidate(endpoint, load, overlap, links=links, engine=engine, **plain)


def _named(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row under its columns, without what is null."""
    if len(columns) != len(row):
        raise SpecError(f"a row has {len(row)} values for the {len(columns)} columns {', '.join(columns)}")
    return {name: value for name, value in zip(columns, row, strict=True) if value is not None}


def _values(columns: Sequence[str], row: Sequence[Any], kind: type[_T]) -> _T:
    """A named tuple from a row, checked."""
    fields: Sequence[str] = kind._fields  # type: ignore[attr-defined]
    if columns == fields and None not in row:
        return msgspec.convert(row, kind)
    named = _named(columns, row)
    defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    return msgspec.convert([named[f] if f in named else defaults.get(f) for f in fields], kind)


def _convert(values: Any, kind: type[_T]) -> _T:
    """Checked; null and what is missing is the field's default."""
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
        line.moved_from,
        replicate_from=line.replicate_from,
        cached_tokens=line.cached_tokens,
        estimated_ttft_s=line.estimated_ttft_s,
        estimated_tpot_s=line.estimated_tpot_s,
    )

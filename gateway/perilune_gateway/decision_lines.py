"""The decision log's lines: JSON that holds all that a decision was taken from, written and read here.

    Writer: pool → lines; decision → lines; ending → line        Reader: lines → Logged | Ended

Five kinds of lines, told apart by `kind` (docs/decision-log.md describes every field):

    pool      schema, routing as the pool document has it, the columns of what follows; first in every file
    endpoint  one endpoint, by a number that later lines use
    engine    one endpoint's speed as believed then, likewise
    decision  the request as the policy saw it, every candidate as a row, what was decided and by which dice
    end       how a request ended, by the number of its decision

Rows are arrays under the columns that `pool` names, because a decision has as many as the pool has endpoints:
about 250 bytes a candidate. A reader finds columns by name: one that it does not know is ignored, one that is
missing has its default. What JSON cannot say (infinity) is null and read as the field's default.

Left out: prompts (never known here), messages of refusals (they may quote a request), tenants (hashed), the
parts of the costs (the policy gives them again). Costs: 1 µs to write a candidate, 5 µs to read one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from perilune_api.pool import Pool, Routing, SpecError
from perilune_api.topology import Link
from perilune_gateway.engine_model import EngineModel
from perilune_gateway.explain import DecisionRecord, Ending, tenant_hash
from perilune_gateway.model import (
    Candidate,
    Cost,
    Decision,
    Endpoint,
    Load,
    Overlap,
    Reason,
    Refusal,
    RefuseReason,
    RequestView,
)

SCHEMA: Literal["perilune.decisions/v1"] = "perilune.decisions/v1"
CANDIDATE = (
    "endpoint",
    "load",
    "overlap",
    "prefill_s",
    "seconds_since_move",
    "links",
    "engine",
    "decode_s",
    "ttft_ratio",
)
"""Columns of a candidate; `endpoint` and `engine` are numbers of lines before it."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "candidate": CANDIDATE,
    "load": Load._fields,
    "overlap": Overlap._fields,
    "link": Link._fields,
}
_MOST_SEEN = 8192
_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class Writer:
    """Values → lines. Numbers of endpoints and engines count from 0 after every `pool` line."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._endpoints = _Numbers[Endpoint]("endpoint")
        self._engines = _Numbers[EngineModel]("engine")

    def pool(self, pool: Pool, time: float) -> bytes:
        """`time`: Unix seconds."""
        self._endpoints.clear()
        self._engines.clear()
        return _line(
            {
                "kind": "pool",
                "schema": SCHEMA,
                "version": self._version,
                "pool": f"{pool.metadata.namespace}/{pool.metadata.name}",
                "time": time,
                "routing": pool.spec.routing,
                "columns": COLUMNS,
            }
        )

    def decision(self, number: int, record: DecisionRecord) -> bytes:
        """The decision, after the endpoints and engines that it is the first to name."""
        new: list[bytes] = []
        rows = [self._row(candidate, new) for candidate in record.candidates]
        line = {
            "kind": "decision",
            "n": number,
            "time": record.time,
            "tenant": tenant_hash(record.tenant),
            "policy": record.policy,
            "dice": record.dice,
            "view": record.view,
            "candidates": rows,
            "excluded": record.excluded,
            "verdict": _verdict(record.verdict),
            "destinations": record.destinations,
            "cached_tokens": record.cached_tokens,
            "timings_us": record.timings_us,
        }
        return b"".join((*new, _line(line)))

    def end(self, number: int, ending: Ending) -> bytes:
        return _line({"kind": "end", "n": number} | msgspec.to_builtins(ending))

    def _row(self, c: Candidate, new: list[bytes]) -> tuple[object, ...]:
        endpoint, load, overlap, prefill_s, since_move_s, links, engine, decode_s, ttft_ratio = c
        return (
            self._endpoints.of(endpoint, new),
            load,
            overlap,
            prefill_s,
            since_move_s,
            links,
            self._engines.of(engine, new),
            decode_s,
            ttft_ratio,
        )


class _Numbers(Generic[_T]):
    """Values by number, each written when it is first named. Equal ones have one number; found by identity
    first, because hashing one costs more than writing a row."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._numbers: dict[_T, int] = {}
        self._seen: dict[int, tuple[int, _T]] = {}

    def clear(self) -> None:
        self._numbers.clear()
        self._seen.clear()

    def of(self, value: _T, new: list[bytes]) -> int:
        """Its number; the line that says what it is is appended to `new` the first time."""
        seen = self._seen.get(id(value))
        if seen is not None:
            return seen[0]
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._numbers)
            new.append(_line({"kind": self._kind, "id": number} | msgspec.to_builtins(value)))
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[id(value)] = number, value  # kept alive: its id names nothing else meanwhile
        return number


def _line(values: object) -> bytes:
    return _encode(values) + b"\n"


def _verdict(verdict: Decision | Refusal) -> dict[str, object]:
    if isinstance(verdict, Refusal):
        return {"refused": verdict.reason, "retry_after_s": verdict.retry_after_s}
    values: dict[str, object] = msgspec.to_builtins(replace(verdict, costs=(), move=None))
    if verdict.move:
        values["move"] = msgspec.to_builtins(replace(verdict.move, subject=""))  # it would name the tenant
    return values | {"costs": {cost.address: cost.total for cost in verdict.costs}}


# -- reading ---------------------------------------------------------------------------------------------


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
    schema: Literal["perilune.decisions/v1"]
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
    dice: int
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
            if cut or number == 1:
                raise SpecError(f"{name}: line {cut or number} is no JSON: {error}") from None
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
        except (AttributeError, TypeError, ValueError) as error:  # a row or a cell of another shape
            raise SpecError(f"{name}: line {number} is not as {SCHEMA} says: {error}") from None
        if found is not None:
            yield found
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
            dice=line.dice,
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

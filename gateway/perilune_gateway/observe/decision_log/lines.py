"""The decision log's lines: JSON that holds all that a decision was taken from, written here.

    Writer: pool → line; decision → lines; ending → line

Five kinds of lines, told apart by `kind` (docs/decision-log.md describes every field):

    pool      schema, routing as the pool document has it, the columns of what follows; first in every file
    endpoint  one endpoint, by a number that later lines use
    engine    one endpoint's speed as believed then, likewise
    decision  the request as the policy saw it, every candidate as a row, the random seed, the verdict
    end       how a request ended, by the number of its decision

Rows are arrays under the columns that `pool` names, because a decision has as many as the pool has endpoints:
200 to 330 bytes a candidate. What JSON cannot say (infinity) is null.

Left out: prompts (never known here), messages of refusals (they may quote a request), tenants (hashed), the
parts of the costs (the policy gives them again). Cost: about 2 µs a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, Literal, TypeVar

import msgspec

from perilune_api.pool import Pool
from perilune_api.topology import Link
from perilune_gateway.model import (
    Candidate,
    Decision,
    DecisionRecord,
    Ending,
    Endpoint,
    EngineModel,
    Load,
    Overlap,
    Prefix,
    Refusal,
    tenant_hash,
)

SCHEMA: Literal["perilune.decisions/v2"] = "perilune.decisions/v2"
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
        rows = [self._row(candidate, record.view.prefix, new) for candidate in record.candidates]
        line = {
            "kind": "decision",
            "n": number,
            "time": record.time,
            "tenant": tenant_hash(record.tenant),
            "policy": record.policy,
            "seed": record.seed,
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

    def _row(self, c: Candidate, prefix: Prefix, new: list[bytes]) -> tuple[object, ...]:
        """One candidate, with its links to the holders of the prefix."""
        endpoint, load, overlap, prefill_s, since_move_s, links, engine, decode_s, ttft_ratio = c
        return (
            self._endpoints.of(endpoint, new),
            load,
            overlap,
            prefill_s,
            since_move_s,
            {there: links[there] for there, _ in prefix.locations if there in links},
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
    values: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(verdict, costs=(), move=None))
    if verdict.move:
        values["move"] = msgspec.to_builtins(replace(verdict.move, subject=""))  # it would name the tenant
    return values | {"costs": {cost.address: cost.total for cost in verdict.costs}}

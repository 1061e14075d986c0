"""Encodes the decision log's lines: JSON with everything that a decision was based on.

    Writer: pool → line; decision → lines; ending → line

The field `kind` says which of six kinds a line is (docs/decision-log.md describes every field):

    pool      schema, routing of the pool document, the columns of later lines; first in every file
    endpoint  one endpoint, with a number that later lines use
    engine    the assumed speed of one endpoint, with a number likewise
    decision  the request as the policy saw it, every candidate as a row, the random seed, the verdict
    end       how a request ended, with the number of its decision
    handoff   how a hand-off of KV ended

A row is an array of the columns that `pool` names, because a decision has a row for each endpoint: 200 to 330
bytes for each candidate. Values that JSON does not have (infinity) are null.

The log contains no prompts, no messages of refusals (which may quote a request), only hashes of tenants, and
no parts of costs (the policy can compute them again). Costs about 2 µs for each candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import msgspec

from perilune_api.pool import Pool, Role
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
    Refusal,
    tenant_hash,
)
from perilune_gateway.model.handoff import HandoffRecord
from perilune_gateway.observe.moves import subject_fields

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
"""Columns of a candidate; `endpoint` and `engine` are numbers that earlier lines define."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "candidate": CANDIDATE,
    "load": Load._fields,
    "overlap": Overlap._fields,
    "link": Link._fields,
}
_MAX_SEEN = 8192
"""Number of objects whose identity `_Numbers` remembers."""
_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class Writer:
    """Encodes values as lines. Numbers of endpoints and engines start at 0 after every `pool` line."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._endpoints = _Numbers[Endpoint]("endpoint")
        self._engines = _Numbers[EngineModel]("engine")

    def pool(self, pool: Pool, time: float) -> bytes:
        """Return the line of a pool document; `time` is in Unix seconds."""
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
        """Return the line of a decision, after lines for the endpoints and engines that have no number
        yet."""
        new: list[bytes] = []
        linked = {address for address, *_ in record.view.prefix.locations}
        linked |= {c.address for c in record.candidates if c.endpoint.role is Role.PREFILL}
        rows = [self._row(candidate, linked, new) for candidate in record.candidates]
        line = {
            "kind": "decision",
            "n": number,
            "time": record.time,
            "tenant": tenant_hash(record.tenant),
            "policy": record.policy,
            "seed": record.seed,
            "queued_s": record.queued_s,
            "canary": record.canary,
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

    def handoff(self, record: HandoffRecord) -> bytes:
        """Return the line of a hand-off. A session is named by a hash of its tenant and by its id."""
        values: dict[str, Any] = msgspec.to_builtins(replace(record, move=replace(record.move, subject="")))
        move = values.pop("move")
        del move["subject"], move["transfer_bytes"]
        named = subject_fields(record.move.subject)
        return _line({"kind": "handoff"} | named | move | values)

    def _row(self, c: Candidate, linked: Collection[str], new: list[bytes]) -> tuple[object, ...]:
        """Return one candidate, with its links to the `linked` endpoints."""
        return (
            self._endpoints.of(c.endpoint, new),
            c.load,
            c.overlap,
            c.prefill_s,
            c.seconds_since_move,
            {there: c.links[there] for there in linked if there in c.links},
            self._engines.of(c.engine, new),
            c.decode_s,
            c.ttft_ratio,
        )


class _Numbers(Generic[_T]):
    """Numbers values, and writes a line for each new one. Equal values have the same number. They are looked
    up by identity first, because hashing a value costs more than writing a row."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._numbers: dict[_T, int] = {}
        self._seen: dict[int, tuple[int, _T]] = {}

    def clear(self) -> None:
        self._numbers.clear()
        self._seen.clear()

    def of(self, value: _T, new: list[bytes]) -> int:
        """Return the value's number. For a new value, the line that defines it is appended to `new`."""
        seen = self._seen.get(id(value))
        if seen is not None:
            return seen[0]
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._numbers)
            new.append(_line({"kind": self._kind, "id": number} | msgspec.to_builtins(value)))
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen[id(value)] = number, value  # keeps the value alive, so that no other object gets its id
        return number


def _line(values: object) -> bytes:
    return _encode(values) + b"\n"


def _verdict(verdict: Decision | Refusal) -> dict[str, object]:
    if isinstance(verdict, Refusal):
        return {"refused": verdict.reason, "retry_after_s": verdict.retry_after_s}
    bare = msgspec.structs.replace(verdict, costs=(), prefill_costs=(), move=None)
    values: dict[str, object] = msgspec.to_builtins(bare)
    del values["prefill_costs"]  # which follow from the candidates
    if verdict.move:
        values["move"] = msgspec.to_builtins(
            replace(verdict.move, subject="")
        )  # a subject contains the tenant
    return values | {"costs": {cost.address: cost.total for cost in verdict.costs}}

"""The conversations that engines store, so that a request which names an earlier response can be tokenized.

    routed request ─ keep ─▶ its input, by the id of its response ─ before ─▶ all turns before another request

Such a request brings only what is new (`previous_response_id`). The inputs of the turns before it came
through this gateway; what was answered is asked of the engine that stores it (tokens/engine.py), once. Kept
are those whose response got its id from this gateway, since a client may use an id of its own twice.

At most `max_bytes` are kept, and the oldest turns go first. Then, after a restart, and at another gateway of
the pool, they are not known. Costs a copy of each input.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from msgspec import Raw

from perilune_gateway.request.parsed import ChatPrompt, EarlierTurn, ParsedRequest

MOST_BYTES = 32 * 1024 * 1024
MOST_TURNS = 1024
"""A longer conversation is not tokenized."""
_ENTRY_BYTES = 512
"""What a turn takes beside its texts."""


class _Kept(NamedTuple):
    turn: EarlierTurn
    previous: str
    """Id of the response before; empty for the first."""
    bytes: int
    """What the turn was counted as; its answer comes later."""


class StoredTurns:
    """The stored conversations of one pool."""

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """By the id of the response, the one that was used least recently first."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response_id: str, request: ParsedRequest, server: str) -> None:
        """Keep the input of a request that was routed to `server`, which stores the response."""
        if response_id and request.stored and isinstance(request.prompt, ChatPrompt):
            given = Raw(bytes(request.prompt.messages))
            turn = EarlierTurn(response_id=response_id, server=server, input=given)
            self._count(response_id, turn, request.previous_response_id)
            self._limit()

    def before(self, response_id: str) -> tuple[EarlierTurn, ...]:
        """Return the turns of a conversation up to this response; nothing if one of them is not known."""
        turns: list[EarlierTurn] = []
        while response_id:
            kept = self._kept.get(response_id)
            if kept is None or len(turns) >= MOST_TURNS:
                return ()
            turns.append(kept.turn)
            self._count(response_id, kept.turn, kept.previous)
            response_id = kept.previous
        self._limit()
        return tuple(reversed(turns))

    def _count(self, response_id: str, turn: EarlierTurn, previous: str) -> None:
        """Make it the turn that was used last, and count it as it is now."""
        before = self._kept.pop(response_id, None)
        kept = self._kept[response_id] = _Kept(turn, previous, _size(turn))
        self.held_bytes += kept.bytes - (before.bytes if before else 0)

    def _limit(self) -> None:
        while self.held_bytes > self._max_bytes:
            self.held_bytes -= self._kept.popitem(last=False)[1].bytes


def _size(turn: EarlierTurn) -> int:
    return len(turn.input) + sum(map(len, turn.said or ())) + _ENTRY_BYTES

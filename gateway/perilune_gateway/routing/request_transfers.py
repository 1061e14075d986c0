"""The transfers of KV for single requests, whoever sends it:

- remote_prefills.py: another endpoint prefills the prompt;
- pulling.py: the endpoint fetches the KV before it gets the request;
- peer_reads.py: the endpoint reads from another one's host memory while it has the request.

Each keeps a `Transfer` of its own kind in the request's record, and counts its ends here.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from perilune_gateway.model.handoff import EXPIRED, GivenUp, HandoffOutcome, HandoffRecord
from perilune_gateway.state.facts import HandedOver, Tell
from perilune_gateway.state.in_flight import Transfer

RECENT = 50
"""Number of ended transfers that are remembered."""


class TransferStats(Struct, frozen=True):
    """Statistics of a pool's transfers of one kind."""

    open: int
    outcomes: Mapping[HandoffOutcome, int]
    given_up: Mapping[GivenUp, int]
    transfer_bytes: int
    recent: Sequence[HandoffRecord]


def together(one: TransferStats, other: TransferStats) -> TransferStats:
    """Return the statistics of both."""
    recent = sorted((*one.recent, *other.recent), key=lambda record: record.time)
    return TransferStats(
        one.open + other.open,
        Counter(one.outcomes) + Counter(other.outcomes),
        Counter(one.given_up) + Counter(other.given_up),
        one.transfer_bytes + other.transfer_bytes,
        recent[-RECENT:],
    )


class RequestTransfers:
    """The transfers of one kind: how many are under way, and what became of those that ended."""

    def __init__(self, tell: Tell, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        """`tell` hears `HandedOver`."""
        self._tell = tell
        self._clock = clock
        self._wall_clock = wall_clock
        self.under_way = 0
        self._outcomes: Counter[HandoffOutcome] = Counter()
        self._given_up: Counter[GivenUp] = Counter()
        self._bytes = 0
        self._recent: deque[HandoffRecord] = deque(maxlen=RECENT)

    def ended(self, transfer: Transfer, cached_tokens: int, *, seen: bool = True) -> None:
        """Record the end of a transfer. `cached_tokens`: those of the prompt that the target has. `seen`:
        whether that is known."""
        move, cause = transfer.move, transfer.cause
        outcome = HandoffOutcome.COPIED if seen else HandoffOutcome.UNSEEN
        if cause:
            outcome = HandoffOutcome.EXPIRED if cause in EXPIRED else HandoffOutcome.FAILED
            self._given_up[cause] += 1
        self._outcomes[outcome] += 1
        self._bytes += move.transfer_bytes
        record = HandoffRecord(
            move=move,
            outcome=outcome,
            cause=cause,
            tokens=transfer.tokens,
            pulled_tokens=cached_tokens,
            transfer_bytes=move.transfer_bytes,
            rounds=1,
            seconds=self._clock() - transfer.began_at,
            time=self._wall_clock(),
        )
        self._recent.append(record)
        self._tell(HandedOver(record))

    def stats(self) -> TransferStats:
        return TransferStats(
            self.under_way, dict(self._outcomes), dict(self._given_up), self._bytes, tuple(self._recent)
        )

"""What became of the KV that was transferred for single requests: remote prefills, and KV that goes with a
request."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from perilune_gateway.model import Move
from perilune_gateway.model.handoff import EXPIRED, GivenUp, HandoffOutcome, HandoffRecord
from perilune_gateway.routing.observer import HandoffObserver

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


class EndedTransfers:
    """The transfers of one kind that have ended."""

    def __init__(
        self, observer: HandoffObserver, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._wall_clock = wall_clock
        self._outcomes: Counter[HandoffOutcome] = Counter()
        self._given_up: Counter[GivenUp] = Counter()
        self._bytes = 0
        self._recent: deque[HandoffRecord] = deque(maxlen=RECENT)

    def add(
        self,
        move: Move,
        tokens: int,
        cached_tokens: int,
        cause: GivenUp | None,
        began_at: float,
        *,
        seen: bool = True,
    ) -> None:
        """Note the end of a transfer. `tokens`: of the prompt that it was about. `cached_tokens`: those that
        the target has. `cause`: why it was given up; None if it was not. `seen`: whether `cached_tokens` is
        known."""
        outcome = HandoffOutcome.COPIED if seen else HandoffOutcome.UNSEEN
        if cause:
            outcome = HandoffOutcome.EXPIRED if cause in EXPIRED else HandoffOutcome.FAILED
            self._given_up[cause] += 1
        self._outcomes[outcome] += 1
        self._bytes += move.transfer_bytes
        record = HandoffRecord(
            move,
            outcome,
            cause,
            tokens,
            cached_tokens,
            move.transfer_bytes,
            1,
            self._clock() - began_at,
            self._wall_clock(),
        )
        self._recent.append(record)
        self._observer.handed_over(record)

    def stats(self, under_way: int) -> TransferStats:
        """Return the statistics. `under_way`: number of transfers that have not ended."""
        return TransferStats(
            under_way, dict(self._outcomes), dict(self._given_up), self._bytes, tuple(self._recent)
        )

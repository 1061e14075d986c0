"""Where batches go: parity is told once per change, what was applied reaches the router."""

import pytest

from perilune_api.pool import Hashing
from perilune_gateway import blocks
from perilune_gateway.feeds.events import EventSink
from perilune_gateway.feeds.kv_events import Batch, BlockStored, ResetCause
from perilune_gateway.parity import Parity, ParityCheck
from perilune_gateway.state.engine_blocks import Applied, EngineBlocks
from perilune_gateway.state.prefix_index import PrefixIndex

OURS, OTHERS = Hashing(), Hashing(seed="7")


class Router:
    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def on_applied(self, applied: Applied) -> None:
        self.applied.append(applied)


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def sink(router: Router) -> EventSink:
    index = PrefixIndex(100, 30.0)
    return EventSink(EngineBlocks(index, 4, store=False), ParityCheck(OURS, 4), router, lambda: 0.0)


def stored(first: int, hashing: Hashing) -> Batch:
    """One block at a prompt's beginning, as an engine with these settings names it."""
    ids = tuple(range(first, first + 4))
    names = tuple(blocks.low64(digest) for digest in blocks.vllm_hashes(ids, 4, hashing))
    return Batch(0.0, (BlockStored(names, None, ids, 4, medium="GPU"),))


def test_what_was_applied_reaches_the_router(sink: EventSink, router: Router) -> None:
    sink.batch("e", 0, stored(0, OURS), 0.0)
    sink.reset("e", 0, ResetCause.LOST)
    assert [(a.stored, a.cleared) for a in router.applied] == [
        (tuple(blocks.chain(range(4), 4, 0)), False),
        ((), True),
    ]


def test_parity_is_logged_when_it_changes(sink: EventSink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for first in range(0, 40, 4):
        sink.batch("e", 0, stored(first, OTHERS), 0.0)
    (line,) = caplog.messages
    assert "differ" in line
    assert "endpoint=e" in line
    caplog.clear()
    sink.batch("f", 0, stored(0, OURS), 0.0)
    sink.batch("f", 0, stored(4, OURS), 0.0)
    assert caplog.messages == ["block hashes equal the engine's endpoint=f"]


@pytest.mark.parametrize(("lag_s", "said"), [(0.1, Parity.TEMPLATE), (5.0, Parity.OK)])
def test_parity_is_told_how_late_events_come(router: Router, lag_s: float, said: Parity) -> None:
    parity = ParityCheck(OURS, 4)
    sink = EventSink(EngineBlocks(PrefixIndex(100, 30.0), 4, store=False), parity, router, lambda: 0.0)
    sink.batch("e", 0, stored(0, OURS), lag_s)
    for _ in range(20):
        parity.request_blocks_seen("e", False)
    assert parity.report("e").parity is said

"""What the operator reads of metrics pages, by the real pages."""

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from routing_objects import candidate, request, session

from perilune_gateway.model import Decision, DecisionRecord, Endpoint, Outcome, Reason
from perilune_gateway.model.kv_events import EventStats
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.stats import EndpointStats, Snapshot
from perilune_operator.observe.facts import Drained, GatewayStats
from perilune_operator.observe.gateway_pages import gateway_stats


def page(*, sessions: int = 0, prompts: bool = False, drained: Mapping[str, str] = {}) -> str:
    """A gateway's."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    stats = EndpointStats(Endpoint("a"), events=EventStats(connected=True))
    metrics.mirror(lambda: Snapshot((stats,), sessions_bound=sessions, drained=drained))
    if prompts:
        decided = Decision("a", Reason.HOST)
        view = request(tokens=1_000, of=session("a"))
        metrics.decided(DecisionRecord(view, decided, "ear", (candidate("a"),), cached_tokens=800))
        metrics.ended("a", Outcome.COMPLETED)
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        pytest.param([], None, id="no gateway"),
        pytest.param(["", ""], None, id="none answers"),
        pytest.param(
            ["perilune_sessions_bound NaN\nperilune_cache_hit_ratio x\n"],
            GatewayStats(0, None),
            id="no numbers",
        ),
        pytest.param([page(sessions=3)], GatewayStats(3, None), id="no prompt yet"),
        pytest.param(
            [page(sessions=3, prompts=True), "", page(sessions=4)], GatewayStats(7, 0.8), id="all that answer"
        ),
    ],
)
def test_sessions_and_hits_are_read_from_the_gateways_pages(
    pages: list[str], told: GatewayStats | None
) -> None:
    assert gateway_stats({f"g{i}": page for i, page in enumerate(pages)}) == told


def test_drained_engines_are_read_from_the_gateways_pages() -> None:
    pages = {"g1": page(drained={"e1": "2026-01-01T00:00:00Z", "e2": "m"}), "g2": "", "g3": page()}
    told = gateway_stats(pages)
    assert told
    assert told.drained == {Drained("g1", "e1", "2026-01-01T00:00:00Z"), Drained("g1", "e2", "m")}

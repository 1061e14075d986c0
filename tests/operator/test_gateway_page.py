"""What the operator and the dashboard read of metrics pages, by the real pages."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from routing_objects import candidate, request, session

from perilune_gateway.model import Decision, DecisionRecord, Endpoint, Outcome, Reason
from perilune_gateway.model.kv_events import EventStats
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.stats import EndpointStats, Snapshot
from perilune_operator.metrics import Metrics as OperatorMetrics
from perilune_operator.metrics import Outcome as RoundOutcome
from perilune_operator.observe.facts import Drained, GatewayStats
from perilune_operator.observe.gateway_pages import gateway_stats

DASHBOARD = Path(__file__).parents[2] / "charts/perilune/files/dashboard.json"


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


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    registry = CollectorRegistry()
    operator = OperatorMetrics(registry, lambda: 0.0)
    operator.round(RoundOutcome.DONE, 0.1, 0.1, changed=True)
    operator.wrote("PATCH", "ConfigMap")
    pages = page(prompts=True) + generate_latest(registry).decode()
    known = set(re.findall(r"^(perilune_\w+)", pages, re.MULTILINE))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"perilune_\w+", target["expr"])
    }
    assert len(asked) > 10
    assert asked <= known


SCRAPED = frozenset({"namespace", "service", "pod", "le"})
"""Labels that come from Prometheus itself."""


def test_the_dashboard_asks_by_labels_that_these_metrics_have() -> None:
    registry = CollectorRegistry()
    OperatorMetrics(registry, lambda: 0.0).round(RoundOutcome.DONE, 0.1, 0.1, changed=True)
    pages = page(prompts=True) + generate_latest(registry).decode()
    labels: dict[str, set[str]] = {}
    for name, told in re.findall(r"^(perilune_\w+)(?:{(.*)})? ", pages, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', told))
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"perilune_\w+", target["expr"])
            by = re.findall(r"by \(([^)]*)\)", target["expr"]) + re.findall(r"{([^}]*)}", target["expr"])
            asked = set(re.findall(r"(\w+)(?=\s*(?:=|,|$))", ",".join(re.sub('"[^"]*"', "", b) for b in by)))
            shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            assert asked | shown <= labels.get(name, set()) | SCRAPED, target["expr"]

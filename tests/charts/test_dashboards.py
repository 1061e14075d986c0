"""The dashboards show what operators of a pool with several gateways have to see."""

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "charts/perilune/files/dashboards"
PANELS = {
    panel["title"]: panel
    for path in sorted(FOLDER.glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
}


@pytest.mark.parametrize(
    ("title", "metrics"),
    [
        (
            "Shared state: gateways that its server answers, and those that each hears",
            [
                "perilune_shared_state_connected",
                "perilune_shared_state_peers",
                "perilune_shared_state_reconnects_total",
            ],
        ),
        (
            "Shared state: from writing a change to reading it back",
            ["perilune_shared_state_lag_seconds"],
        ),
    ],
)
def test_a_dashboard_shows_how_shared_state_fares(title: str, metrics: list[str]) -> None:
    panel: dict[str, Any] = PANELS[title]
    queries = " ".join(target["expr"] for target in panel["targets"])
    assert [metric for metric in metrics if metric not in queries] == []

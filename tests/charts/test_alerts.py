"""Every alert fires on what it is about, stays silent otherwise, and leads to a heading of the guide."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from charts.alerts import ALERTS, anchor, runbook
from document_tables import headings, page, rows, section

RULES = Path(__file__).parents[2] / "charts/perilune/files/alerts.yaml"
OF_POOL = 'namespace="n", perilune_dev_pool="p", pod="g"'
NO_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool; `make prometheus` installs Debian's"
)


def series(metric: str, values: str, *labels: str) -> dict[str, str]:
    """One series of a gateway, in promtool's notation."""
    return {"series": f"{metric}{{{', '.join((OF_POOL, *labels))}}}", "values": values}


AT_A = 'endpoint="a"'


def decisions(within_50_ms: int) -> list[dict[str, str]]:
    """60 decisions a minute, of which so many take less than 50 ms, and all less than 100."""
    counts = {"0.05": within_50_ms, "0.1": 60, "+Inf": 60}
    name, total = "perilune_scheduling_seconds_bucket", 'step="total"'
    return [series(name, f"0+{count}x60", total, f'le="{le}"') for le, count in counts.items()]


CASES = {
    "PeriluneNoEndpoint": (
        [series("perilune_endpoint_ready", "0x60", AT_A)],
        [series("perilune_endpoint_ready", "1x60", AT_A)],
    ),
    "PeriluneOverloaded": (
        [series("perilune_refusals_total", "0+1x60", 'reason="overloaded"')],
        [series("perilune_refusals_total", "0+1x60", 'reason="bad_json"')],
    ),
    "PeriluneNewSessionsRefused": (
        [series("perilune_refusals_total", "0+1x60", 'reason="no_room"')],
        [series("perilune_refusals_total", "0+1x60", 'reason="bad_json"')],
    ),
    "PeriluneRequestsFail": (
        [series("perilune_requests_total", "0+1x60", AT_A, 'outcome="failed"')],
        [
            series("perilune_requests_total", "0+1x60", AT_A, 'outcome="failed"'),
            series("perilune_requests_total", "0+500x60", AT_A, 'outcome="completed"'),
        ],
    ),
    "PeriluneGatewayFails": (
        [series("perilune_stream_failures_total", "0+1x60")],
        [series("perilune_stream_failures_total", "3x60")],
    ),
    "PeriluneEjected": (
        [series("perilune_endpoint_ejected", "1x60", AT_A)],
        [series("perilune_endpoint_ejected", "0x60", AT_A)],
    ),
    "PeriluneIngestBehind": (
        [series("perilune_ingest_behind_seconds", "0x60"), series("perilune_ingest_busy_ratio", "0.6x60")],
        [series("perilune_ingest_behind_seconds", "1x60"), series("perilune_ingest_busy_ratio", "0.4x60")],
    ),
    "PeriluneEventsLost": (
        [series("perilune_events_rebuilds_total", "0+1x60", AT_A)],
        [series("perilune_events_rebuilds_total", "1x60", AT_A)],
    ),
    "PeriluneParity": (
        [series("perilune_parity", "1x60", AT_A, 'state="seed"')],
        [series("perilune_parity", "1x60", AT_A, 'state="ok"')],
    ),
    "PeriluneDecisionsSlow": (decisions(1), decisions(60)),
    "PeriluneSharedStateLost": (
        [series("perilune_shared_state_connected", "0x60")],
        [series("perilune_shared_state_connected", "1x60")],
    ),
    "PeriluneReconcileFails": (
        [series("perilune_operator_rounds_total", "0+1x60", 'outcome="failed"')],
        [series("perilune_operator_rounds_total", "0+1x60", 'outcome="done"')],
    ),
    "PeriluneNoOperator": (
        [series("perilune_operator_leader", "0x60")],
        [
            series("perilune_operator_leader", "0x60"),
            series("perilune_operator_leader", "1x60", 'instance="another"'),
        ],
    ),
}
"""Alert → series on which it fires, series on which it does not."""


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_case() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}


@NO_PROMTOOL
@pytest.mark.parametrize("fires", [True, False], ids=["trouble", "health"])
def test_an_alert_fires_in_its_trouble_and_only_then(fires: bool, tmp_path: Path) -> None:
    alerts = {alert.name: alert for alert in ALERTS}
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": cases[0 if fires else 1],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{alerts[name].minutes + 20}m",
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }
        for name, cases in CASES.items()
    ]
    written = tmp_path / "tests.yaml"
    written.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    promtool("test", "rules", written)


@NO_PROMTOOL
def test_prometheus_accepts_the_rule_file() -> None:
    promtool("check", "rules", RULES)


def test_every_alert_leads_to_a_heading_of_the_guide() -> None:
    guide = headings(page("troubleshooting.md"))
    assert [alert.name for alert in ALERTS if alert.heading not in guide] == []
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    runbooks = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules}
    assert runbooks == {alert.name: runbook(alert) for alert in ALERTS}


def test_no_alert_guesses_where_the_guide_is_published() -> None:
    assert "://" not in RULES.read_text()


def test_the_documents_list_every_alert() -> None:
    listed = rows(section(page("observability.md"), "## Alerts"), "alert")
    links = [
        [alert.name, alert.severity, f"[{alert.heading}](troubleshooting.md#{anchor(alert.heading)})"]
        for alert in ALERTS
    ]
    assert listed == links

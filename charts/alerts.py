"""The alerts as a table, which `python -m protos.generate` writes as the rules that the chart ships.

Each alert names the heading of docs/troubleshooting.md that says what to do.
"""

from dataclasses import dataclass
from enum import StrEnum

import yaml

from perilune_api import names

POOL = "namespace, perilune_dev_pool"


class Severity(StrEnum):
    CRITICAL = "critical"
    """Clients get errors."""
    WARNING = "warning"
    """Requests are served, more slowly or with less knowledge than they could be."""


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expression: str
    minutes: int
    """For how long the expression must hold."""
    severity: Severity
    summary: str
    heading: str
    """Of the guide."""


_OF = "pool {{ $labels.namespace }}/{{ $labels.perilune_dev_pool }}"

ALERTS = (
    Alert(
        "PeriluneNoEndpoint",
        f"max by ({POOL}) (sum by ({POOL}, pod) (perilune_endpoint_ready)) == 0",
        1,
        Severity.CRITICAL,
        f"No endpoint of {_OF} can be chosen, so requests get 503",
        "no_endpoint",
    ),
    Alert(
        "PeriluneOverloaded",
        f'sum by ({POOL}) (rate(perilune_refusals_total{{reason="overloaded"}}[5m])) > 0',
        5,
        Severity.CRITICAL,
        f"Requests to {_OF} are refused with 429",
        "429 overloaded",
    ),
    Alert(
        "PeriluneNewSessionsRefused",
        f'sum by ({POOL}) (rate(perilune_refusals_total{{reason="no_room"}}[5m])) > 0',
        5,
        Severity.CRITICAL,
        f"New sessions of {_OF} are refused with 429, because active ones fill the KV caches",
        "sessions_wait",
    ),
    Alert(
        "PeriluneRequestsFail",
        f'sum by ({POOL}) (rate(perilune_requests_total{{outcome="failed"}}[5m]))'
        f" > 0.01 * sum by ({POOL}) (rate(perilune_requests_total[5m]))",
        5,
        Severity.CRITICAL,
        f"More than 1 % of the requests to {_OF} fail",
        "Requests fail",
    ),
    Alert(
        "PeriluneGatewayFails",
        f"sum by ({POOL}) (rate(perilune_stream_failures_total[5m])) > 0",
        1,
        Severity.CRITICAL,
        f"The gateway of {_OF} ends streams by a bug",
        "Errors of the gateway",
    ),
    Alert(
        "PeriluneEjected",
        f"max by ({POOL}, endpoint) (perilune_endpoint_ejected) == 1",
        5,
        Severity.WARNING,
        f"Endpoint {{{{ $labels.endpoint }}}} of {_OF} is ejected: its answers fail or are late",
        "ejected",
    ),
    Alert(
        "PeriluneIngestBehind",
        f"max by ({POOL}, pod) (perilune_ingest_behind_seconds) > {names.BEHIND_S:g}"
        f" or max by ({POOL}, pod) (perilune_ingest_busy_ratio) > {names.BUSY_INGEST:g}",
        5,
        Severity.WARNING,
        f"Gateway {{{{ $labels.pod }}}} of {_OF} hardly keeps up with KV events, or does not",
        "ingest_behind",
    ),
    Alert(
        "PeriluneEventsLost",
        f"sum by ({POOL}, endpoint) (increase(perilune_events_rebuilds_total[15m])) > 0",
        0,
        Severity.WARNING,
        f"KV events of endpoint {{{{ $labels.endpoint }}}} of {_OF} were lost",
        "lost_events",
    ),
    Alert(
        "PeriluneParity",
        f'max by ({POOL}, endpoint, state) (perilune_parity{{state!~"ok|unknown"}}) == 1',
        10,
        Severity.WARNING,
        f"Block hashes of endpoint {{{{ $labels.endpoint }}}} of {_OF} differ: {{{{ $labels.state }}}}",
        "parity",
    ),
    Alert(
        "PeriluneDecisionsSlow",
        "histogram_quantile(0.99, sum by"
        f' (le, {POOL}) (rate(perilune_scheduling_seconds_bucket{{step="total"}}[5m]))) > 0.05',
        10,
        Severity.WARNING,
        f"One decision in a hundred of {_OF} takes more than 50 ms",
        "Decisions are slow",
    ),
    Alert(
        "PeriluneSharedStateLost",
        f"min by ({POOL}, pod) (perilune_shared_state_connected) == 0",
        2,
        Severity.WARNING,
        f"Gateway {{{{ $labels.pod }}}} of {_OF} decides alone, without the server of shared state",
        "shared_state",
    ),
    Alert(
        "PeriluneReconcileFails",
        'sum by (namespace) (rate(perilune_operator_rounds_total{outcome="failed"}[10m])) > 0',
        10,
        Severity.WARNING,
        "The operator in {{ $labels.namespace }} cannot bring a pool to what its spec says",
        "ApplyFailed",
    ),
    Alert(
        "PeriluneNoOperator",
        "sum by (namespace) (perilune_operator_leader) == 0",
        2,
        Severity.CRITICAL,
        "No operator in {{ $labels.namespace }} acts, so pools are not changed",
        "No operator acts",
    ),
)


def anchor(heading: str) -> str:
    """Return the heading's part of an address."""
    return heading.lower().replace(" ", "-")


def runbook(alert: Alert) -> str:
    """Return where the guide says what to do. It has no address: installations keep their own copies."""
    return f"docs/troubleshooting.md, heading {alert.heading}"


def document() -> bytes:
    """Return the groups of a PrometheusRule, which a plain Prometheus reads as well."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity.value},
            "annotations": {
                "summary": alert.summary,
                "runbook": runbook(alert),
            },
        }
        for alert in ALERTS
    ]
    groups = {"groups": [{"name": "perilune", "rules": rules}]}
    return yaml.safe_dump(groups, sort_keys=False, width=110).encode()

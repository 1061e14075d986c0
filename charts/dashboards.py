"""The Grafana dashboards as tables: a title, a unit and the queries of each panel.

`python -m protos.generate` writes them as the JSON that the chart ships. `$pool` and `$namespace` are the
dashboards' own variables. Series of gateways and engines carry the pool's label, which the monitors of the
operator set.
"""

import json
from dataclasses import dataclass

WINDOW = "$__rate_interval"
OF_POOL = 'namespace=~"$namespace", perilune_dev_pool=~"$pool"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 12, 8


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    """In Grafana's words: `s`, `reqps`, `percentunit`, `bytes`, `short`."""
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[Panel, ...]


def _of(metric: str, *more: str) -> str:
    return f"{metric}{{{', '.join((*more, OF_POOL))}}}"


def _rate(metric: str, *more: str) -> str:
    return f"rate({_of(metric, *more)}[{WINDOW}])"


def _by(labels: str, metric: str, *more: str) -> str:
    return f"sum by ({labels}) ({_rate(metric, *more)})"


def _quantiles(histogram: str, *more: str, by: str = "") -> tuple[Query, ...]:
    """p50, p90 and p99 of a histogram."""
    groups = ", ".join(filter(None, ("le", by)))
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({q}, {_by(groups, f'{histogram}_bucket', *more)})", f"p{q * 100:.0f}{legend}"
        )
        for q in (0.5, 0.9, 0.99)
    )


def _share(part: str, whole: str) -> str:
    return f"sum({_rate(part)}) / sum({_rate(whole)})"


def _p99_of_operator(histogram: str) -> str:
    return f"histogram_quantile(0.99, sum by (le) (rate({histogram}_bucket[{WINDOW}])))"


_PROMPT_TOKENS = "perilune_prompt_tokens_total"
_SHADOW = "perilune_shadow_decisions_total"
_SAME, _VERDICTS = 'agreement="same"', 'agreement=~"same|other|refused"'

USERS = Dashboard(
    "perilune-users",
    "Perilune: users",
    (
        Panel(
            "Requests per second, by outcome",
            "reqps",
            (Query(_by("outcome", "perilune_requests_total"), "{{outcome}}"),),
        ),
        Panel(
            "Requests refused per second, by reason",
            "reqps",
            (Query(_by("reason", "perilune_refusals_total"), "{{reason}}"),),
        ),
        Panel(
            "New sessions: waiting now, and seconds that they waited",
            "short",
            (
                Query(f"sum({_of('perilune_new_sessions_waiting')})", "waiting"),
                *_quantiles("perilune_new_session_queued_seconds"),
            ),
        ),
        Panel("TTFT, as engines measure it", "s", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("TPOT, as engines measure it", "s", _quantiles("vllm:request_time_per_output_token_seconds")),
        Panel("Whole requests, as engines measure them", "s", _quantiles("vllm:e2e_request_latency_seconds")),
        Panel(
            "Cached share of prompt tokens: reachable, predicted, achieved",
            "percentunit",
            (
                Query(
                    _share("perilune_reachable_cached_tokens_total", _PROMPT_TOKENS),
                    "reachable: cached at some endpoint",
                ),
                Query(
                    _share("perilune_predicted_cached_tokens_total", _PROMPT_TOKENS),
                    "predicted: cached at the chosen one",
                ),
                Query(
                    _share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
                    "achieved: as engines count",
                ),
            ),
        ),
        Panel(
            "Decisions per second, by reason",
            "reqps",
            (Query(_by("reason", "perilune_decisions_total"), "{{reason}}"),),
        ),
        Panel(
            "Requests of sessions per second, by whether they reach their host",
            "reqps",
            (Query(_by("affinity", "perilune_session_requests_total"), "{{affinity}}"),),
        ),
        Panel(
            "Moves per minute",
            "short",
            (
                Query(f"60 * sum({_rate('perilune_migrations_total')})", "decided with a request"),
                Query(
                    f"60 * {_by('reason, state', 'perilune_moves_total')}", "planned: {{reason}}, {{state}}"
                ),
            ),
        ),
        Panel(
            "Seconds of queued prefill, by endpoint",
            "s",
            (Query(_of("perilune_endpoint_pending_prefill_seconds"), "{{endpoint}}"),),
        ),
    ),
)

OPERATORS = Dashboard(
    "perilune-operators",
    "Perilune: operators",
    (
        Panel(
            "CPU cores of each gateway", "short", (Query(_by("pod", "process_cpu_seconds_total"), "{{pod}}"),)
        ),
        Panel(
            "Resident memory of each gateway",
            "bytes",
            (Query(_of("process_resident_memory_bytes"), "{{pod}}"),),
        ),
        Panel(
            "Shadow policies: share of decisions that agree, and predicted hits",
            "percentunit",
            (
                Query(
                    f"{_by('policy', _SHADOW, _SAME)} / {_by('policy', _SHADOW, _VERDICTS)}",
                    "{{policy}} agrees",
                ),
                Query(
                    f"{_by('policy', 'perilune_shadow_cached_tokens_total')}"
                    f" / {_by('policy', 'perilune_shadow_prompt_tokens_total')}",
                    "{{policy}} hits",
                ),
                Query(
                    f"sum({_rate('perilune_shadow_decided_cached_tokens_total')})"
                    f" / sum({_rate('perilune_shadow_prompt_tokens_total')})",
                    "decided hits",
                ),
            ),
        ),
        Panel(
            "Shadow policies: predicted regret per decision",
            "s",
            (
                Query(
                    f"({_by('policy', 'perilune_shadow_slower_seconds_total')}"
                    f" - {_by('policy', 'perilune_shadow_faster_seconds_total')})"
                    f" / {_by('policy', _SHADOW, _VERDICTS)}",
                    "{{policy}}",
                ),
            ),
        ),
        Panel(
            "Shadow policies: CPU cores, and decisions per second that are not judged",
            "short",
            (
                Query(_by("pod", "perilune_shadow_cpu_seconds_total"), "cores of {{pod}}"),
                Query(_by("cause", "perilune_shadow_skipped_total"), "not judged: {{cause}}"),
            ),
        ),
        Panel(
            "Canary: typical TTFT and TPOT of both arms since it began",
            "s",
            (
                Query(f"avg by (arm) ({_of('perilune_canary_ttft_seconds')})", "TTFT {{arm}}"),
                Query(f"avg by (arm) ({_of('perilune_canary_tpot_seconds')})", "TPOT {{arm}}"),
            ),
        ),
        Panel(
            "Canary: hits and failures of both arms",
            "percentunit",
            (
                Query(f"avg by (arm) ({_of('perilune_canary_hit_ratio')})", "hits {{arm}}"),
                Query(
                    f"{_by('arm', 'perilune_canary_failures_total')}"
                    f" / {_by('arm', 'perilune_canary_requests_total')}",
                    "failures {{arm}}",
                ),
            ),
        ),
        Panel("Time to decide", "s", _quantiles("perilune_scheduling_seconds", 'step="total"')),
        Panel(
            "Share of the gateway's event loop that KV events take",
            "percentunit",
            (Query(_of("perilune_ingest_busy_ratio"), "{{pod}}"),),
        ),
        Panel(
            "Delay of KV events",
            "s",
            (
                Query(_of("perilune_ingest_behind_seconds"), "in the gateway {{pod}}"),
                Query(f"max by (endpoint) ({_of('perilune_events_lag_seconds')})", "from {{endpoint}}"),
            ),
        ),
        Panel(
            "KV events lost per minute",
            "short",
            (
                Query(f"60 * sum({_rate('perilune_events_gaps_total')})", "gaps"),
                Query(f"60 * sum({_rate('perilune_events_rebuilds_total')})", "rebuilds"),
                Query(f"60 * sum({_rate('perilune_events_malformed_total')})", "malformed"),
            ),
        ),
        Panel(
            "Blocks in the index, by endpoint",
            "short",
            (Query(f"sum by (endpoint) ({_of('perilune_index_blocks')})", "{{endpoint}}"),),
        ),
        Panel(
            "Forgotten for want of room, per minute",
            "short",
            (
                Query(f"60 * sum({_rate('perilune_index_evicted_blocks_total')})", "blocks"),
                Query(f"60 * sum({_rate('perilune_sessions_evicted_total')})", "sessions"),
            ),
        ),
        Panel(
            "Endpoints",
            "short",
            (
                Query(f"sum by (pod) ({_of('perilune_endpoint_ready')})", "ready, says {{pod}}"),
                Query(f"sum by (pod) ({_of('perilune_endpoint_ejected')})", "ejected, says {{pod}}"),
                Query(f"sum by (pod) ({_of('perilune_endpoint_draining')})", "draining, says {{pod}}"),
            ),
        ),
        Panel(
            "KV pool in use, by endpoint",
            "percentunit",
            (Query(_of("perilune_endpoint_kv_usage_ratio"), "{{endpoint}}"),),
        ),
        Panel(
            "TTFT, observed over predicted",
            "short",
            (Query(_of("perilune_endpoint_ttft_ratio"), "{{endpoint}}"),),
        ),
        Panel(
            "Streams of Envoy",
            "short",
            (
                Query(f"sum({_of('perilune_streams_open')})", "open"),
                Query(
                    f"60 * sum({_rate('perilune_stream_protocol_errors_total')})",
                    "protocol errors per minute",
                ),
                Query(f"60 * sum({_rate('perilune_stream_failures_total')})", "failures per minute"),
            ),
        ),
        Panel(
            "Shared state: gateways that its server answers, and those that each hears",
            "short",
            (
                Query(f"sum({_of('perilune_shared_state_connected')})", "answered"),
                Query(f"count({_of('perilune_shared_state_connected')})", "gateways"),
                Query(_of("perilune_shared_state_peers"), "heard by {{pod}}"),
                Query(
                    f"60 * sum({_rate('perilune_shared_state_reconnects_total')})", "reconnects per minute"
                ),
            ),
        ),
        Panel(
            "Shared state: from writing a change to reading it back",
            "s",
            (Query(_of("perilune_shared_state_lag_seconds"), "{{pod}}"),),
        ),
        Panel(
            "Operator: rounds and writes per second",
            "short",
            (
                Query(
                    f"sum by (outcome) (rate(perilune_operator_rounds_total[{WINDOW}]))", "rounds {{outcome}}"
                ),
                Query(f"sum by (kind) (rate(perilune_operator_writes_total[{WINDOW}]))", "writes {{kind}}"),
            ),
        ),
        Panel(
            "Operator: p99 of a round, and of the reaction to an event",
            "s",
            (
                Query(_p99_of_operator("perilune_operator_round_seconds"), "round"),
                Query(_p99_of_operator("perilune_operator_reaction_seconds"), "reaction"),
            ),
        ),
    ),
)

DASHBOARDS = (USERS, OPERATORS)


def document(dashboard: Dashboard) -> bytes:
    """Return the dashboard as Grafana reads it."""
    made = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["perilune"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                _variable("namespace", "Namespace", "label_values(perilune_build_info, namespace)"),
                _variable(
                    "pool",
                    "Pool",
                    'label_values(perilune_build_info{namespace=~"$namespace"}, perilune_dev_pool)',
                ),
            ]
        },
        "panels": [_panel(i, panel) for i, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(made, indent=1).encode() + b"\n"


def _variable(name: str, label: str, query: str) -> dict[str, object]:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "query": query,
        "datasource": SOURCE,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(i: int, panel: Panel) -> dict[str, object]:
    """Panels stand in two columns."""
    return {
        "id": i + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": i % 2 * WIDTH, "y": i // 2 * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expression, "legendFormat": query.legend}
            for at, query in enumerate(panel.queries)
        ],
    }

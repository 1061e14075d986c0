"""What Prometheus scrapes, where the cluster has the Prometheus operator's kinds. Mooncake's master is not
among it: its port for metrics also takes requests that empty the store (network_policies.py). Engines that
others run are theirs to scrape."""

from collections.abc import Iterator

from perilune_api import names
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import Context


def monitors(pool: Context) -> Iterator[Object]:
    if pool.has("PodMonitor") and pool.spec.engine.selector is None:
        yield _monitor(pool, "engine", "metrics", "PodMonitor")
        if pool.spec.prefill_replicas:
            yield _monitor(pool, "prefill", "metrics", "PodMonitor")
    if pool.has("ServiceMonitor") and not pool.spec.gateway.served_by:
        yield _monitor(pool, "gateway", "admin", "ServiceMonitor")


def _monitor(pool: Context, component: names.Component, port: str, kind: str) -> Object:
    """Return the monitor. Gateways are scraped through their Service, because the engines' autoscaler asks
    for metrics of the Service. `honorLabels` keeps the gateway's own label `endpoint`, which Prometheus would
    overwrite."""
    pods = kind == "PodMonitor"
    scraped = {"port": port, "path": "/metrics", "interval": "15s"}
    made = pool.object(
        kind,
        f"{pool.name}-{component}",
        component,
        spec={
            "selector": {"matchLabels": pool.labels(component)},
            "podMetricsEndpoints" if pods else "endpoints": [
                scraped if pods else {**scraped, "honorLabels": True}
            ],
            "podTargetLabels": [names.POOL_LABEL],
        },
    )
    made["metadata"]["labels"] = {**pool.defaults.monitor_labels, **made["metadata"]["labels"]}
    return made

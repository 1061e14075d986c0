"""The metrics of several pools on one page: each series of a pool gets a label that names the pool.

A family that several registries have (a counter of each pool, say) becomes one family, as the text format
demands. Costs a copy of each sample that gets a label; requests do no work for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

POOL = "perilune_dev_pool"
"""The label. The operator's monitors give it to the series of engines, so dashboards and alerts know both."""


class MergedMetrics:
    """Families that are put together one by one."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, family: Metric, pool: str = "") -> None:
        """Add a pool's family, or without `pool` one that needs no label."""
        whole = self._families.setdefault(
            family.name, Metric(family.name, family.documentation, family.type, family.unit)
        )
        if not pool:
            whole.samples += family.samples
        else:
            label = {POOL: pool}
            whole.samples += [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]

    def families(self) -> Iterable[Metric]:
        """Return all families."""
        return self._families.values()

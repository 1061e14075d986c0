"""The tables of pages that people write, such as docs/evaluation/README.md: figures of several sections side
by side, made from the sections' data.

In such a page each table lies between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from perilune_lab.simulate.deployment import Arm
from perilune_research.evaluation.summaries import goals, policies, pools, traffic
from perilune_research.evaluation.summaries.figures import Pages
from perilune_research.table import Table

DOCUMENTS = ("README.md", "../policies.md")
"""The pages that have such tables, from the folder of the data."""

TABLES: Mapping[str, Callable[[Pages], Table]] = {
    **{f"arm {name}": partial(policies.arm, name=name) for name in Arm},
    "policies": policies.findings,
    "never moving": pools.never_moving,
    "separate prefill": policies.separate_prefill,
    "separate prefill elsewhere": pools.separate_prefill_elsewhere,
    "where the default is behind": policies.behind,
    "goals": goals.goals,
    "capacity": policies.capacity,
    "sixteen seeds at R": policies.sixteen_seeds,
    "sixteen seeds at other loads": policies.more_loads,
    "other pools": pools.other_pools,
    "engines": pools.engines,
    "slower engines": pools.slower,
    "recorded traffic": traffic.recorded,
    "other traffic": traffic.other_traffic,
    "hot hosts": pools.hot_hosts,
    "waiting": pools.waiting,
    "tenants": traffic.fairness,
    "four gateways": pools.four_gateways,
    "session admission": traffic.admission,
    "clients that give up": traffic.giving_up,
    "overlapped transfers": pools.overlap,
    "early rejection": traffic.early_rejection,
}


def filled(text: str, folder: Path) -> str:
    """Return a page's text with all of its tables made from the data in the folder. Raises OSError if a file
    of data is missing, KeyError if a mark's name is not in `TABLES`."""
    pages = Pages(folder)

    def table(mark: re.Match[str]) -> str:
        name = mark["name"]
        return f"<!-- {name} -->\n{TABLES[name](pages).body()}\n<!-- /{name} -->"

    return re.sub(r"<!-- (?P<name>[^/].*?) -->\n.*?<!-- /(?P=name) -->", table, text, flags=re.DOTALL)

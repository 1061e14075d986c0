"""Predicts the CPU time of the evaluation, so that it can be told before it begins.

    seconds = turns × milliseconds of a turn in a pool with defaults, times factors of what costs more

The constants are rounded from the tables *What happened* of docs/evaluation, of one machine: predictions of a
section are good to a half or so.
"""

from __future__ import annotations

from math import inf

from perilune_lab.simulate.deployment import Arm
from perilune_lab.traces.source import AGENTIC
from perilune_research.evaluation.capacity import Search
from perilune_research.evaluation.cells import Cell

TURNS_PER_SESSION = 2.4
"""Turns of a session within the window of generated traffic, on average."""
TURNS_OF_TRACE = 8_000
"""Turns of a recorded trace, on average over the two that are played."""
TURN_S = 0.0021
STORES, SPLIT, TWICE, SHARES = 1.25, 1.4, 1.5, 0.4
"""Factors of a store, of separate prefill, of deciding twice; what each further gateway adds, as a share."""
FULL = 0.125
"""Sessions per second and endpoint at which queues grow, unless a store prevents it. From there on turns cost
the more, the longer they wait."""
SIMULATIONS = 7
"""Simulations of a search."""


def cpu_s(item: Cell | Search) -> float:
    """Return the CPU seconds that it will take, about."""
    if isinstance(item, Search):
        return SIMULATIONS * cpu_s(item.cell)
    recorded = item.trace != AGENTIC
    if recorded:
        turns = min(item.limit or inf, TURNS_OF_TRACE)
    else:
        turns = TURNS_PER_SESSION * item.rate * item.window_s
    turn_s = TURN_S * (1 + SHARES * (item.gateways - 1))
    if item.arm in (Arm.STORE, Arm.BOTH):
        turn_s *= STORES
    elif not recorded:
        turn_s *= max(1.0, item.rate / item.endpoints / FULL) ** 1.5
    return turns * turn_s * (SPLIT if item.split else 1.0) * (TWICE if item.twice else 1.0)

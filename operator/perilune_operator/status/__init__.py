"""Spec, facts and plan → the pool's status: counts, and conditions with reason, message and generation. Pure.

fact.py         one condition, without its transition time
workloads.py    conditions of nodes, engines, store and gateway, and of draining
progress.py     conditions of changes: under way, or stalled
route.py        the condition that tells how requests reach the gateway
others.py       conditions of a pool that shares a gateway with others
summary.py      the whole status: counts, and the conditions with their transition times and Ready
"""

from perilune_operator.status.summary import (
    carried_out,
    changed,
    is_in_force,
    of_pool,
    of_refusal,
    stored,
    with_failure,
    with_more_to_do,
)

__all__ = [
    "carried_out",
    "changed",
    "is_in_force",
    "of_pool",
    "of_refusal",
    "stored",
    "with_failure",
    "with_more_to_do",
]

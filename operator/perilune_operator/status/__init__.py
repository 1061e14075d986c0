"""Spec, facts and plan → the pool's status: counts, and conditions with reason, message and generation. Pure.

fact.py         one condition, before it is dated
workloads.py    conditions of what runs: nodes, engines, store, gateway; what changes, what drains
route.py        the condition that tells how requests reach the gateway
summary.py      the whole status: the conditions in order, summed up as Ready, and dated
"""

from perilune_operator.status.summary import changed, of_pool, of_refusal, with_failure

__all__ = ["changed", "of_pool", "of_refusal", "with_failure"]

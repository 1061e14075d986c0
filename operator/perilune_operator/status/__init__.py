"""Spec, facts and plan → the pool's status: counts, and conditions with reason, message and generation. Pure.

fact.py         one condition, without its transition time
workloads.py    conditions of nodes, engines, store and gateway, of changes under way, and of draining
route.py        the condition that tells how requests reach the gateway
summary.py      the whole status: counts, and the conditions with their transition times and Ready
"""

from perilune_operator.status.summary import changed, of_pool, of_refusal, with_failure

__all__ = ["changed", "of_pool", "of_refusal", "with_failure"]

"""Plans of a pool called p in a namespace called ns, and specs that several tests plan."""

from typing import Any

from perilune_api.inference_pool.checks import convert
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
NOW = 1_760_000_000.0
SPANS: Object = {"model": {"name": "m"}, "engine": {"tensorParallel": 8, "pipelineParallel": 2}}
LWS = "leaderworkerset.x-k8s.io/LeaderWorkerSet"


def made(spec: Object, observed: Observed, now: float = NOW) -> Plan:
    return plan("p", "ns", convert(spec), observed, now, Defaults())

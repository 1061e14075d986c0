"""`plan(name, namespace, spec, observed, now) → Plan`: everything that should exist, and what to say of it.

Pure, and whole each time: what should exist follows from spec and facts, never from which event came.
Planning its own result changes nothing.
"""

from dataclasses import dataclass

from perilune_api.crd import InferencePoolSpec, InferencePoolStatus
from perilune_api.pool import SpecError
from perilune_operator import status, topology
from perilune_operator.observe import Object, Observed
from perilune_operator.render import gateway, mooncake, network, vllm
from perilune_operator.render.objects import Context, Defaults

STATS_S = 30.0
"""Sessions and hit ratio in the status are no older than this."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be."""

    objects: tuple[Object, ...] | None
    """All of them, in the order in which to apply them; None: leave alone what is there."""
    status: InferencePoolStatus
    again_in: float
    """Seconds until the next look, if nothing happens before."""


def plan(
    name: str,
    namespace: str,
    spec: InferencePoolSpec | SpecError,
    observed: Observed,
    now: float,
    defaults: Defaults,
) -> Plan:
    """`now`: seconds since the epoch."""
    if isinstance(spec, SpecError):
        return Plan(None, status.of_refusal(str(spec), observed, now), STATS_S)
    fabric = topology.resolve(spec.topology, observed.nodes, observed.pods)
    pool = Context(name, namespace, observed.uid, spec, fabric, observed.kinds, defaults)
    objects = (*mooncake.store(pool), *vllm.engines(pool), *gateway.gateway(pool), *network.network(pool))
    return Plan(objects, status.of_pool(pool, observed, now), STATS_S)

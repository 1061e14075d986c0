"""Where the engines' pods run: `spec.topology.placement` as affinity and topology spread constraints."""

from collections.abc import Mapping, Sequence
from typing import Literal

from perilune_api import names
from perilune_api.inference_pool.topology import Placement
from perilune_operator.observe.facts import Object
from perilune_operator.render.endpoints import engine_pods

Part = Literal["all", "leader", "worker"]
"""What a pod is of its endpoint: all of it, or one of several pods, of which the first leads."""
NEAR = {"rack": 100, "spine": 50}
"""How much the pods of one endpoint prefer to share a domain of each level, where the pool does not say."""


def placement(
    wanted: Sequence[Placement],
    keys: Mapping[str, str],
    labels: Mapping[str, str],
    revision: str,
    part: Part = "all",
) -> Object:
    """Return `affinity` and `topologySpreadConstraints` of a pod spec. `keys`: level → node label. `labels`:
    the labels of the pods to be placed. `revision`: the label that names a pod's template.

    All engines of a pool pack together, or spread. While a workload rolls out, its new pods spread among
    themselves. Nodes whose taints refuse the pod do not count. Of an endpoint that spans nodes the leader is
    spread, and its workers follow it.
    """
    packed = [p for p in wanted if p.mode == "pack" and p.level in keys]
    spread = [p for p in wanted if p.mode == "spread" and p.level in keys and part != "worker"]
    everyone = engine_pods(labels[names.POOL_LABEL])
    terms = [({"topologyKey": keys[p.level], "labelSelector": everyone}, p.required, 100) for p in packed]
    if part != "all":
        asked: list[tuple[str, bool, int]]
        asked = [(p.level, p.required, 100) for p in wanted if p.mode == "together"]
        own = {"labelSelector": everyone, "matchLabelKeys": [names.GROUP_INDEX]}
        terms += [
            ({"topologyKey": keys[level], **own}, must, weight)
            for level, must, weight in asked or [(level, False, weight) for level, weight in NEAR.items()]
            if level in keys
        ]
    made: Object = {}
    if terms:
        required = [term for term, must, _ in terms if must]
        preferred = [{"weight": w, "podAffinityTerm": term} for term, must, w in terms if not must]
        made["affinity"] = {
            "podAffinity": {
                **({"requiredDuringSchedulingIgnoredDuringExecution": required} if required else {}),
                **({"preferredDuringSchedulingIgnoredDuringExecution": preferred} if preferred else {}),
            }
        }
    if spread:
        made["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": keys[p.level],
                "whenUnsatisfiable": "DoNotSchedule" if p.required else "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(labels)},
                "matchLabelKeys": [revision],
                "nodeTaintsPolicy": "Honor",
            }
            for p in spread
        ]
    return made

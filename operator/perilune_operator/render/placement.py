"""Where the engines' pods run: `spec.topology.placement` as affinity and topology spread constraints."""

from collections.abc import Mapping, Sequence

from perilune_api import names
from perilune_api.inference_pool.topology import Placement
from perilune_operator.observe.facts import Object
from perilune_operator.render.endpoints import engine_pods


def placement(
    wanted: Sequence[Placement], keys: Mapping[str, str], labels: Mapping[str, str], revision: str
) -> Object:
    """Return `affinity` and `topologySpreadConstraints` of a pod spec. `keys`: level → node label. `labels`:
    the labels of the pods to be placed. `revision`: the label that names a pod's template.

    All engines of a pool pack together, or spread. While a workload rolls out, its new pods spread among
    themselves. Nodes whose taints refuse the pod do not count.
    """
    packed = [p for p in wanted if p.mode == "pack" and p.level in keys]
    spread = [p for p in wanted if p.mode == "spread" and p.level in keys]
    everyone = engine_pods(labels[names.POOL_LABEL])
    terms = [({"topologyKey": keys[p.level], "labelSelector": everyone}, p.required) for p in packed]
    made: Object = {}
    if terms:
        required = [term for term, must in terms if must]
        preferred = [{"weight": 100, "podAffinityTerm": term} for term, must in terms if not must]
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

"""Who sets the number of a pool's endpoints. It should be one: the operator by `scaling`, or an autoscaler of
the pool. An autoscaler of the pool's Deployment instead always has another writer, which is the operator. A
tool that applies manifests with `replicas` again and again is seen when it overwrites the operator's number.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.crd import KIND
from perilune_api.inference_pool.spec import InferencePoolSpec, Signal
from perilune_operator.observe.facts import Key, Object, Observed
from perilune_operator.render import endpoints


def contested(name: str, namespace: str, spec: InferencePoolSpec, observed: Observed) -> tuple[str, ...]:
    """Return the writers, if there are several."""
    own = Key("HorizontalPodAutoscaler", namespace, endpoints.workload_name(name))
    of_pool, of_workloads = list[str](), list[str]()
    for k, autoscaler in _autoscalers(observed):
        target = autoscaler.get("spec", {}).get("scaleTargetRef") or {}
        if (_group(target), target.get("kind"), target.get("name")) == (names.GROUP, KIND, name):
            of_pool.append(k.name)
        elif k != own and _is_workload(target, name, namespace):
            of_workloads.append(f"{k.name} (of {target['kind']} {target['name']})")
    by_operator = spec.scaling is not None and spec.scaling.signal is not Signal.METRIC
    writers = [*(["spec.scaling"] if by_operator else []), *sorted(of_pool)]
    if by_operator and observed.overwritten_by:
        writers.append(f"{observed.overwritten_by} (which writes spec.replicas)")
    if of_workloads:
        return (*(writers or ["spec.replicas"]), *sorted(of_workloads))
    return tuple(writers) if len(writers) > 1 else ()


def _autoscalers(observed: Observed) -> Iterator[tuple[Key, Object]]:
    for k, child in observed.children.items():
        if k.kind == "HorizontalPodAutoscaler" and "deletionTimestamp" not in child["metadata"]:
            yield k, child


def _group(target: Object) -> str:
    return str(target.get("apiVersion", "")).partition("/")[0]


def _is_workload(target: Object, name: str, namespace: str) -> bool:
    workloads = (endpoints.workload_name(name), endpoints.prefill_workload(namespace, name).name)
    return target.get("kind") in endpoints.WORKLOADS and target.get("name") in workloads

"""What an endpoint is: its workload's name, its GPUs, and over how many nodes they are.

An endpoint is one pod. If it has more GPUs than a node, it is a group of pods (of a LeaderWorkerSet), of
which the first, the leader, serves and is counted. `engines.py` renders its objects.
"""

from perilune_api import names
from perilune_api.inference_pool.engine import EngineKind
from perilune_operator.observe.facts import Key, Object
from perilune_operator.render.objects import Context

WORKLOADS = ("Deployment", "LeaderWorkerSet")
"""Kinds of workloads that run engines."""


ROLE = "both"
"""The one value of names.ROLE_LABEL. The label stays because a Deployment's selector, which has it, cannot
change; engines with another value were made by an operator that knew roles."""


def workload_name(pool: str) -> str:
    return f"{pool}-engine"


def gpus(pool: Context) -> int:
    """GPUs of one endpoint."""
    engine = pool.spec.engine
    return 0 if engine.kind is EngineKind.SIMULATED else engine.tensor_parallel * engine.pipeline_parallel


def nodes_per_endpoint(pool: Context) -> int:
    """The smallest number of nodes such that each gets the same number of GPUs, which vLLM's ranks require,
    and whole pipeline stages, so that no tensors are split between nodes. A stage larger than a node fills
    several."""
    engine, total = pool.spec.engine, gpus(pool)
    a_node, a_stage, stages = engine.gpus_per_node, engine.tensor_parallel, engine.pipeline_parallel
    if total <= a_node:
        return 1
    if a_stage >= a_node:
        return total // a_node
    return next(n for n in range(2, stages + 1) if stages % n == 0 and total // n <= a_node)


def gpus_per_pod(pool: Context) -> int:
    return gpus(pool) // nodes_per_endpoint(pool)


def every_pod(pool: Context) -> Object:
    """Selects all pods of all endpoints, workers too: an endpoint that loses one of them starts anew."""
    if nodes_per_endpoint(pool) == 1:
        return {"matchLabels": pool.labels("engine")}
    return engine_pods(pool.name)


def engine_pods(pool: str) -> Object:
    """Selects the same pods, whatever the number of nodes of an endpoint."""
    components = {"key": names.COMPONENT_LABEL, "operator": "In", "values": ["engine", "engine-worker"]}
    return {"matchLabels": {names.POOL_LABEL: pool}, "matchExpressions": [components]}


def workload(pool: Context) -> Key:
    """What runs the endpoints."""
    kind = "Deployment" if nodes_per_endpoint(pool) == 1 else "LeaderWorkerSet"
    return Key(kind, pool.namespace, workload_name(pool.name))


def engine_labels(pool: Context, component: names.Component) -> dict[str, str]:
    """Labels of the pods of engines, or of their workers."""
    return {**pool.labels(component), names.ROLE_LABEL: ROLE}


def can_run(pool: Context) -> bool:
    """Whether the cluster knows the kind of workload that runs an endpoint."""
    return nodes_per_endpoint(pool) == 1 or pool.has("LeaderWorkerSet")

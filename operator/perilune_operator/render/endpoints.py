"""What an endpoint is: its workload, its GPUs, and the number of nodes that they span.

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
"""The only value of names.ROLE_LABEL. Deployments that exist select their pods by this label, and a selector
cannot change. Engines with another value belong to an earlier version of the operator."""


def workload_name(pool: str) -> str:
    return f"{pool}-engine"


def prefill_workload(namespace: str, pool: str) -> Key:
    """Return the workload that runs the endpoints that only prefill."""
    return Key("Deployment", namespace, f"{pool}-prefill")


def gpus(pool: Context) -> int:
    """Return the GPUs of one endpoint."""
    engine = pool.spec.engine
    return (
        0
        if engine.kind is EngineKind.SIMULATED
        else engine.tensor_parallel * engine.pipeline_parallel * ranks(pool)
    )


def ranks(pool: Context) -> int:
    """Return the data-parallel ranks of one endpoint. A simulated engine has one."""
    engine = pool.spec.engine
    return 1 if engine.kind is EngineKind.SIMULATED else engine.data_parallel


def nodes_per_endpoint(pool: Context) -> int:
    """Return the smallest number of nodes that get equal numbers of GPUs, which vLLM's ranks require, and
    whole data-parallel ranks, or of one rank whole pipeline stages, so that no tensor is split between nodes.
    A stage that needs more GPUs than a node has fills several nodes."""
    engine, total = pool.spec.engine, gpus(pool)
    a_node, a_stage, stages = engine.gpus_per_node, engine.tensor_parallel, engine.pipeline_parallel
    if total <= a_node:
        return 1
    if (parts := ranks(pool)) > 1:
        return next(n for n in range(2, parts + 1) if parts % n == 0 and total // n <= a_node)
    if a_stage >= a_node:
        return total // a_node
    return next(n for n in range(2, stages + 1) if stages % n == 0 and total // n <= a_node)


def ranks_per_pod(pool: Context) -> int:
    """Return the data-parallel ranks that one pod runs; 1 where pods have parts of one rank."""
    return max(1, ranks(pool) // nodes_per_endpoint(pool))


def gpus_per_pod(pool: Context) -> int:
    return gpus(pool) // nodes_per_endpoint(pool)


def every_pod(pool: Context) -> Object:
    """Select all pods of all endpoints. Workers are included where an endpoint spans nodes, because it
    restarts when it loses one of them."""
    if nodes_per_endpoint(pool) == 1:
        return {"matchLabels": pool.labels("engine")}
    return engine_pods(pool.name)


def engine_pods(pool: str) -> Object:
    """Select the pods of all endpoints and their workers, whatever the number of nodes of an endpoint."""
    components = {"key": names.COMPONENT_LABEL, "operator": "In", "values": ["engine", "engine-worker"]}
    return {"matchLabels": {names.POOL_LABEL: pool}, "matchExpressions": [components]}


def workload(pool: Context) -> Key:
    """Return the workload that runs the endpoints."""
    kind = "Deployment" if nodes_per_endpoint(pool) == 1 else "LeaderWorkerSet"
    return Key(kind, pool.namespace, workload_name(pool.name))


def engine_labels(pool: Context, component: names.Component) -> dict[str, str]:
    """Return the labels that select the pods of engines, or those of their workers."""
    return {**pool.labels(component), names.ROLE_LABEL: ROLE}


def with_duty(pool: Context, duty: names.Duty) -> dict[str, str]:
    """Return the labels that select the endpoints that have this duty now."""
    if pool.spec.role_switching:
        return {names.POOL_LABEL: pool.name, names.DUTY_LABEL: duty}
    return pool.labels("engine" if duty == "serve" else "prefill")


def can_run(pool: Context) -> bool:
    """Return whether the cluster knows the kind of workload that runs an endpoint."""
    return nodes_per_endpoint(pool) == 1 or pool.has("LeaderWorkerSet")

"""Engines of several pools behind one Service, for a gateway that serves other pools besides its own.

A route with one backend for each pool shares out requests among the backends, whichever engine the gateway
has chosen: a pool without engines would take the others' requests. So the route has one backend, a Service
(names.models_name) that selects the engines of all these pools by a label. A pool's template does not have
the label, because engines would restart whenever `serves` changes; the operator writes it on running pods,
which takes less time than an engine takes to start. Pure.
"""

from collections.abc import Sequence

from perilune_api import names
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_operator.observe.facts import Key, Object, Observed
from perilune_operator.rollout import Mark


def marks(name: str, spec: InferencePoolSpec, observed: Observed) -> tuple[Mark, ...]:
    """Label the pool's engines with the pool whose gateway serves them, if it serves several pools."""
    server = _server(name, spec, observed)
    wanted = {pod.name: server if pod.duty == "serve" else "" for pod in observed.pods}
    return tuple(
        Mark(pod.name, pod.uid, {}, {names.SERVER_LABEL: wanted[pod.name] or None})
        for pod in observed.pods
        if pod.server != wanted[pod.name]
    )


def _server(name: str, spec: InferencePoolSpec, observed: Observed) -> str:
    """Return the pool whose Service selects this pool's engines; empty if none does. A pool that does not
    name this one in `serves` wants none of its engines."""
    if spec.gateway.serves:
        return name
    other = observed.others.get(spec.gateway.served_by)
    return spec.gateway.served_by if other is not None and name in other.serves else ""


def is_reachable(name: str, namespace: str, observed: Observed) -> bool:
    """Return whether the Service reaches every engine that serves, so that a route may lead to it alone. One
    that leads there already stays, and a new one begins with it."""
    route = observed.children.get(Key("HTTPRoute", namespace, name))
    if route is None or names.models_name(name) in _backends(route):
        return True
    serving = (pod for pod in (*observed.pods, *observed.served_pods) if pod.duty == "serve" and pod.serves)
    there = Key("Service", namespace, names.models_name(name)) in observed.children
    return there and all(pod.server == name for pod in serving)


def _backends(route: Object) -> Sequence[str]:
    rules = (route.get("spec") or {}).get("rules") or ()
    return [backend["name"] for rule in rules for backend in rule.get("backendRefs") or ()]

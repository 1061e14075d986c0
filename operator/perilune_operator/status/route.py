"""Condition RouteProgrammed: whether requests reach the gateway.

It reads what other controllers report about the route, the objects that go with it, and the Gateway. The
checks come in this order, and the first that fails is reported: the spec asks for a route that this cluster
can have; a controller has accepted the current version of each of its objects; the Gateway serves; no older
pool gets the same requests.
"""

from collections.abc import Iterator, Mapping, Sequence

from perilune_api import names
from perilune_api.conditions import Condition, Reason
from perilune_api.inference_pool.gateway import GatewayMode, ParentRef
from perilune_operator.observe.facts import Key, Object, Observed, ParentFacts, Rival, Verdict
from perilune_operator.observe.readers import verdicts
from perilune_operator.render import routing
from perilune_operator.render.objects import Context, size
from perilune_operator.status import others
from perilune_operator.status.fact import Fact, listed

_BESIDE: Mapping[GatewayMode, Sequence[str]] = {
    GatewayMode.ENVOY_GATEWAY: ("BackendTrafficPolicy", "EnvoyExtensionPolicy"),
    GatewayMode.INFERENCE_EXTENSION: ("InferencePool",),
}
"""Objects that a controller has to accept besides the HTTPRoute."""


def route(pool: Context, observed: Observed) -> Fact:
    kind, made = Condition.ROUTE_PROGRAMMED, routing.mode(pool)
    if pool.spec.gateway.served_by:
        return others.of_server(kind, pool, observed)
    if pool.spec.gateway.mode is GatewayMode.NONE:
        return Fact(kind, "True", Reason.PROGRAMMED, "The spec asks for no route.")
    if made is GatewayMode.NONE:
        return Fact(
            kind,
            "False",
            Reason.NO_ROUTE_API,
            "The cluster has neither Envoy Gateway's CRDs nor the inference extension's.",
        )
    if pool.spec.gateway.parent is None:
        return Fact(kind, "False", Reason.NO_PARENT, "spec.gateway.parent names no Gateway.")
    parent = pool.spec.gateway.parent
    trouble = _not_accepted(pool, observed, parent, made) or _not_programmed(parent, observed.parent)
    if trouble is not None:
        return trouble
    if observed.rival is not None:
        return Fact(kind, "False", Reason.ROUTE_SHADOWED, _shadowed(parent, observed.rival))
    words = ["Envoy asks the gateway.", *_cautions(pool, observed, parent, made)]
    return Fact(kind, "True", Reason.PROGRAMMED, " ".join(words))


def _not_accepted(pool: Context, observed: Observed, parent: ParentRef, made: GatewayMode) -> Fact | None:
    """Return why one of the route's objects is not accepted; None when all of them are."""
    kind = Condition.ROUTE_PROGRAMMED
    own_route = () if pool.spec.gateway.route else ("HTTPRoute",)
    for name in (*own_route, *_BESIDE[made]):
        said = _verdicts(observed.children.get(Key(name, pool.namespace, pool.name)) or {}, parent)
        if not said:
            return Fact(
                kind, "False", Reason.WAITING_FOR_ROUTE, f"No controller has reported on the {name} yet."
            )
        if any(verdict.pending or verdict.status == "Unknown" for verdict in said):
            waits = f"The report on the {name} is undecided, or about an earlier version of it."
            return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, waits)
        if refused := _refused(name, said):
            return refused
    return _also_refused(pool, observed, parent)


def _refused(name: str, said: Sequence[Verdict]) -> Fact | None:
    for verdict in said:
        if verdict.status == "False" and not verdict.pending:
            words = f"{name}: {verdict.reason}: {verdict.message}"
            return Fact(Condition.ROUTE_PROGRAMMED, "False", Reason.ROUTE_REFUSED, words[:400])
    return None


def _also_refused(pool: Context, observed: Observed, parent: ParentRef) -> Fact | None:
    """Return why a policy by which Envoy asks the gateway or engines over TLS is refused, or the route of
    what Envoy refuses itself. A missing report is no trouble: controllers need not report on a Service that
    no route names, and requests reach the gateway without the second route."""
    for kind, name in (
        ("BackendTLSPolicy", names.gateway_name(pool.name)),
        ("BackendTLSPolicy", pool.name),
        ("HTTPRoute", names.refusals_name(pool.name)),
    ):
        also = observed.children.get(Key(kind, pool.namespace, name), {})
        if refused := _refused(f"{kind} {name}", _verdicts(also, parent)):
            return refused
    return None


def _verdicts(child: Object, gateway: ParentRef) -> list[Verdict]:
    """Return the conditions Accepted and ResolvedRefs that controllers wrote on an object for the pool's
    Gateway. A user's own route may attach an InferencePool to another Gateway. (A policy lists its target's
    Gateways.)"""
    status, meta = child.get("status") or {}, child.get("metadata", {})
    reports = [
        report
        for report in status.get("parents") or ()
        if _is_of(report.get("parentRef") or {}, gateway, meta.get("namespace", ""))
    ]
    return [
        verdict
        for report in (*reports, *(status.get("ancestors") or ()))
        for verdict in verdicts(
            report.get("conditions"), meta.get("generation", 0), "Accepted", "ResolvedRefs"
        )
    ]


def _is_of(reference: Object, gateway: ParentRef, here: str) -> bool:
    """Return whether a reference names the pool's Gateway; one without a namespace does if the name is the
    same."""
    namespace = gateway.namespace or here
    return (reference.get("namespace") or namespace, reference.get("name")) == (namespace, gateway.name)


def _not_programmed(named: ParentRef, parent: ParentFacts | None) -> Fact | None:
    """Return why the Gateway does not serve; None when it does, or when it is outside the watched
    namespace."""
    if parent is None:
        return None
    kind, of = Condition.ROUTE_PROGRAMMED, f"Gateway {named.name}"
    if not parent.exists:
        return Fact(kind, "False", Reason.GATEWAY_NOT_PROGRAMMED, f"{of} does not exist.")
    said = parent.programmed
    if named.section_name and (said is None or said.status == "True"):
        of, said = f"Listener {named.section_name} of {of}", parent.listeners.get(named.section_name, said)
    if said is None or said.pending:
        return Fact(
            kind,
            "False",
            Reason.WAITING_FOR_ROUTE,
            f"No controller has reported yet whether {of} is programmed.",
        )
    if said.status != "True":
        words = f"{of} is not programmed: {said.reason}: {said.message}"
        return Fact(kind, "False", Reason.GATEWAY_NOT_PROGRAMMED, words[:400])
    return None


def _shadowed(parent: ParentRef, rival: Rival) -> str:
    which = f"Requests for {listed(rival.hosts)}" if rival.hosts else "Requests"
    return (
        f"{which} at Gateway {parent.name} go to pool {'/'.join(rival.pool)}, whose route is older. "
        "Give each pool its own hosts (gateway.hostnames) or listener (gateway.parent.sectionName)."
    )


def _cautions(pool: Context, observed: Observed, parent: ParentRef, made: GatewayMode) -> Iterator[str]:
    """Yield warnings where Envoy may obey a destination that a client sends, or refuse bodies that the pool
    takes, because the ClientTrafficPolicy that would change that is not the operator's."""
    needed_bytes = pool.spec.routing.limits.max_body_bytes
    removes = f"remove {names.DESTINATION_HEADER} early, or clients can choose their endpoint"
    buffers = (
        f"set connection.bufferLimit to {size(needed_bytes)}, or Envoy answers 413 to bodies above its own "
        "limit (by default 32 KiB)"
    )
    both = f"{removes}, and {buffers}"
    if made is GatewayMode.ENVOY_GATEWAY and parent.namespace not in ("", pool.namespace):
        yield (
            f"The Gateway is in another namespace: a ClientTrafficPolicy there has to {both}: see the "
            "chart's notes (helm get notes)."
        )
    if made is GatewayMode.ENVOY_GATEWAY and parent.namespace in ("", pool.namespace):
        others = routing.foreign_policies(pool)
        lacks = [
            *([removes] if not all(map(routing.removes_destination, others)) else ()),
            *([buffers] if not all(routing.buffers(policy, needed_bytes) for policy in others) else ()),
        ]
        if lacks:
            named = listed([policy["metadata"]["name"] for policy in others])
            yield f"ClientTrafficPolicy {named} is not the operator's: it has to {', and '.join(lacks)}."
        if not others and pool.spec.gateway.client_traffic_policy == "none":
            yield f"gateway.clientTrafficPolicy is none: one of yours has to {both}."
    shared = Key("ClientTrafficPolicy", pool.namespace, routing.shared_policy_name(parent))
    for verdict in _verdicts(observed.children.get(shared, {}), parent):
        if verdict.status == "False":  # the Gateway has another one already
            yield f"{shared.kind} {shared.name}: {verdict.reason}: the one in force has to {both}."

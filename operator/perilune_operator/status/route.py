"""Whether requests come to the gateway: what controllers say of the route, of the objects beside it, and of
the Gateway itself.

The first that does not hold is told, in this order: a route is asked for and can be made; every object of it
is taken up, decided on as it is now, accepted; the Gateway serves; no older pool has the same requests.
"""

from collections.abc import Iterator, Mapping, Sequence

from perilune_api import names
from perilune_api.conditions import Condition, Reason
from perilune_api.inference_pool.gateway import GatewayMode, ParentRef
from perilune_operator.observe.facts import Key, Object, Observed, ParentFacts, Rival, Verdict
from perilune_operator.observe.readers import verdicts
from perilune_operator.render import routing
from perilune_operator.render.objects import Context
from perilune_operator.status.fact import Fact, listed

_BESIDE: Mapping[GatewayMode, Sequence[str]] = {
    GatewayMode.ENVOY_GATEWAY: ("BackendTrafficPolicy", "EnvoyExtensionPolicy"),
    GatewayMode.INFERENCE_EXTENSION: ("InferencePool",),
}
"""What controllers have to accept beside the HTTPRoute."""


def route(pool: Context, observed: Observed) -> Fact:
    kind, made = Condition.ROUTE_PROGRAMMED, routing.mode(pool)
    if pool.spec.gateway.mode is GatewayMode.NONE:
        return Fact(kind, "True", Reason.PROGRAMMED, "No route is asked for.")
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
    """What controllers have against one of its objects; None: nothing."""
    kind = Condition.ROUTE_PROGRAMMED
    for name in ("HTTPRoute", *_BESIDE[made]):
        said = _verdicts(observed.children.get(Key(name, pool.namespace, pool.name)) or {}, parent)
        if not said:
            return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, f"Nobody has taken up the {name} yet.")
        if any(verdict.pending or verdict.status == "Unknown" for verdict in said):
            waits = f"What is said of the {name} is pending: it is undecided, or of an earlier one."
            return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, waits)
        for verdict in said:
            if verdict.status == "False":
                refused = f"{name}: {verdict.reason}: {verdict.message}"
                return Fact(kind, "False", Reason.ROUTE_REFUSED, refused[:400])
    return None


def _verdicts(child: Object, gateway: ParentRef) -> list[Verdict]:
    """Conditions Accepted and ResolvedRefs that controllers wrote of it, for our Gateway: a route of somebody
    else's may attach an InferencePool to another one. (A policy's ancestors are whatever its target has.)"""
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
    """A reference without a namespace is believed to mean ours."""
    namespace = gateway.namespace or here
    return (reference.get("namespace") or namespace, reference.get("name")) == (namespace, gateway.name)


def _not_programmed(named: ParentRef, parent: ParentFacts | None) -> Fact | None:
    """What keeps the Gateway from serving; None: nothing that can be seen from here."""
    if parent is None:
        return None
    kind, of = Condition.ROUTE_PROGRAMMED, f"Gateway {named.name}"
    if not parent.exists:
        return Fact(kind, "False", Reason.GATEWAY_NOT_PROGRAMMED, f"There is no {of}.")
    said = parent.programmed
    if named.section_name and (said is None or said.status == "True"):
        of, said = f"Listener {named.section_name} of {of}", parent.listeners.get(named.section_name, said)
    if said is None or said.pending:
        return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, f"Whether {of} is programmed is pending.")
    if said.status != "True":
        words = f"{of} is not programmed: {said.reason}: {said.message}"
        return Fact(kind, "False", Reason.GATEWAY_NOT_PROGRAMMED, words[:400])
    return None


def _shadowed(parent: ParentRef, rival: Rival) -> str:
    which = f"Requests for {listed(rival.hosts)}" if rival.hosts else "Requests"
    return (
        f"{which} at Gateway {parent.name} go to pool {'/'.join(rival.pool)}, whose route is older: "
        "give each pool hosts (gateway.hostnames) or a listener (gateway.parent.sectionName) of its own."
    )


def _cautions(pool: Context, observed: Observed, parent: ParentRef, made: GatewayMode) -> Iterator[str]:
    """Where a client's own destination may be obeyed: the ClientTrafficPolicy that removes it is not ours."""
    if made is GatewayMode.ENVOY_GATEWAY and parent.namespace not in ("", pool.namespace):
        yield (
            "The Gateway is in another namespace: a ClientTrafficPolicy there has to remove "
            f"{names.DESTINATION_HEADER} early, or clients can choose their endpoint: see the chart's notes "
            "(helm get notes)."
        )
    shared = Key("ClientTrafficPolicy", pool.namespace, routing.shared_policy_name(parent))
    for verdict in _verdicts(observed.children.get(shared, {}), parent):
        if verdict.status == "False":  # the Gateway has one already, which may or may not do the same
            yield (
                f"{shared.kind} {shared.name}: {verdict.reason}: the one that counts has to remove "
                f"{names.DESTINATION_HEADER} early, or clients can choose their endpoint."
            )

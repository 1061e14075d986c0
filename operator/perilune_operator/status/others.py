"""What the status of a pool says of the pools that its gateway serves in addition, and of the pool whose
gateway serves it (both have to name each other, in `serves` and in `servedBy`), and of other autoscalers than
its own.
"""

from perilune_api.conditions import Condition, Reason
from perilune_operator.observe.facts import Observed, OtherPool
from perilune_operator.render.objects import Context
from perilune_operator.scaling import writers
from perilune_operator.status.fact import Fact, listed


def of_server(kind: Condition, pool: Context, observed: Observed) -> Fact:
    """Return condition GatewayReady or RouteProgrammed of a pool that another one serves: that pool's own."""
    name = pool.spec.gateway.served_by
    server = observed.others.get(name)
    if server is None:
        return Fact(
            kind, "False", Reason.NO_SUCH_POOL, f"gateway.servedBy names {name}, and there is no such pool."
        )
    if pool.name not in server.serves:
        words = f"Pool {name} does not name this pool in gateway.serves, so its gateway does not serve it."
        return Fact(kind, "False", Reason.NOT_NAMED, words)
    said = server.said.get(kind)
    if said is None:
        return Fact(kind, "False", Reason.WAITING_FOR_GATEWAY, f"Pool {name} has no condition {kind} yet.")
    if said.status != "True":
        reason = Reason(said.reason) if said.reason in set(Reason) else Reason.WAITING_FOR_GATEWAY
        return Fact(kind, "False", reason, f"Pool {name}: {said.message}"[:400])
    if kind is Condition.GATEWAY_READY:
        return Fact(kind, "True", Reason.AVAILABLE, f"The gateway of the pool {name} serves it.")
    return Fact(kind, "True", Reason.PROGRAMMED, f"The route of the pool {name} leads to it.")


def served(pool: Context, observed: Observed) -> Fact | None:
    """Return whether the pools that its gateway serves in addition are there; None if there should be none.
    The pool's own model is served whatever they are."""
    wanted = pool.spec.gateway.serves
    if not wanted:
        return None
    kind = Condition.SERVED_POOLS_READY
    missing = [name for name in wanted if name not in observed.others]
    if missing:
        words = (
            f"gateway.serves names {listed(missing)}, and there is no such pool. The gateway waits for it."
        )
        return Fact(kind, "False", Reason.NO_SUCH_POOL, words)
    foreign = [name for name in wanted if observed.others[name].served_by != pool.name]
    if foreign:
        words = f"{listed(foreign)} does not name this pool in gateway.servedBy."
        return Fact(kind, "False", Reason.NOT_NAMED, words)
    tls = pool.spec.engine.tls is not None
    different = [name for name in wanted if observed.others[name].engine_tls is not tls]
    if different:
        has, lacks = ("this pool", listed(different)) if tls else (listed(different), "this pool")
        words = f"All pools that share a gateway have engine.tls, or none: {has} has it, and {lacks} has not."
        return Fact(kind, "False", Reason.TLS_DIFFERS, words)
    unready = [trouble for name in wanted if (trouble := _trouble(name, observed.others[name]))]
    if unready:
        return Fact(kind, "False", Reason.POOL_NOT_READY, listed(unready)[:400])
    return Fact(kind, "True", Reason.AVAILABLE, f"{listed(wanted)} can be served, too.")


def contested(pool: Context, observed: Observed) -> Fact | None:
    """Return whether several writers set the number of endpoints; None if not."""
    who = writers.contested(pool.name, pool.namespace, pool.spec, observed)
    if not who:
        return None
    words = f"The number of endpoints is set by {', '.join(who)}. Leave one of them, or it changes for ever."
    return Fact(Condition.REPLICAS_CONTESTED, "True", Reason.SEVERAL_WRITERS, words[:400])


def _trouble(name: str, other: OtherPool) -> str:
    """Return why another pool is not ready; empty if it is."""
    said = other.said.get(Condition.READY)
    if said is None:
        return f"{name} has no status yet"
    return "" if said.status == "True" else f"{name}: {said.message}"

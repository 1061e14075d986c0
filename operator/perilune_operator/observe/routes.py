"""Whose requests are whose, where routes of several pools want the same ones of a Gateway.

1. *Claims* of a route: each host on each listener that it names and that takes it. Its own hostnames,
   narrowed to the listener's where the Gateway can be seen; a wider host than another's (`*.a`, any) is
   another claim, since it gets what the narrower one leaves.
2. The oldest route has what it claims; of the same second, the first by namespace and name. So Gateway API
   (v1, HTTPRouteRule.matches) decides between routes that match alike, and ours all do: one path each.
3. Whoever claims what an older one has, has a *rival*. His route is accepted all the same, and nobody but us
   tells him that it gets nothing.

Pure; costs a look at each claim. Routes that others than pools have made are not looked at.
"""

from collections.abc import Iterator, Mapping

from perilune_operator.observe.facts import Listener, Object, PoolName, Rival
from perilune_operator.observe.readers import verdicts


def rivals(
    routes: Mapping[PoolName, Object], gateways: Mapping[str, Mapping[str, Listener]]
) -> dict[PoolName, Rival]:
    """Of the pools that have one, the oldest. `routes`: HTTPRoutes of pools. `gateways`: namespace/name →
    listeners by their names, of those that can be seen."""
    standing = {pool: route for pool, route in routes.items() if not _is_refused(route)}
    sections: dict[str, set[str]] = {}
    for route in standing.values():
        for gateway, section in _parents(route):
            sections.setdefault(gateway, {""}).add(section)
    listeners = {
        name: gateways[name] if name in gateways else dict.fromkeys(named, Listener())
        for name, named in sections.items()
    }
    taken: dict[tuple[str, str, str], PoolName] = {}
    found: dict[PoolName, dict[PoolName, set[str]]] = {}
    for pool in sorted(standing, key=lambda pool: (standing[pool]["metadata"]["creationTimestamp"], pool)):
        for gateway, listener, host in _claims(standing[pool], listeners):
            owner = taken.setdefault((gateway, listener, host), pool)
            if owner != pool:
                found.setdefault(pool, {}).setdefault(owner, set()).add(host)
    firsts = {pool: next(iter(owners.items())) for pool, owners in found.items()}
    return {pool: Rival(owner, tuple(sorted(hosts - {""}))) for pool, (owner, hosts) in firsts.items()}


def _claims(route: Object, listeners: Mapping[str, Mapping[str, Listener]]) -> Iterator[tuple[str, str, str]]:
    """Gateway, listener, host. `listeners`: by Gateway."""
    here, wanted = route["metadata"]["namespace"], route["spec"].get("hostnames") or [""]
    for gateway, section in _parents(route):
        for name, listener in listeners[gateway].items():
            takes = listener.namespaces is None or here in listener.namespaces
            for host in wanted if takes and section in ("", name) else ():
                if _covers(listener.host, host):
                    yield gateway, name, host
                elif _covers(host, listener.host):
                    yield gateway, name, listener.host


def _covers(wide: str, narrow: str) -> bool:
    return wide in ("", narrow) or (wide.startswith("*.") and narrow.endswith(wide[1:]))


def _parents(route: Object) -> list[tuple[str, str]]:
    """Gateways, and the listener of each; empty: all."""
    here = route["metadata"]["namespace"]
    given = route["spec"].get("parentRefs") or ()
    return [(f"{p.get('namespace') or here}/{p['name']}", p.get("sectionName", "")) for p in given]


def _is_refused(route: Object) -> bool:
    reports = (route.get("status") or {}).get("parents") or ()
    generation = route["metadata"].get("generation", 0)
    return any(
        verdict.status == "False" and not verdict.pending
        for report in reports
        for verdict in verdicts(report.get("conditions"), generation, "Accepted")
    )

"""Pools whose routes compete for the same requests of a Gateway, and which of them gets these requests.

1. *Claims* of a route: each host on each listener that it names and that accepts it. The hosts are the
   route's own, narrowed to the listener's where the Gateway is watched. A wider host than another's (`*.a`,
   any) is a different claim, since it gets what the narrower one leaves.
2. The oldest route gets what it claims; among routes of the same second, the first by namespace and name.
   This is Gateway API's rule for routes that match equally (v1, HTTPRouteRule.matches), as the routes of
   all pools do that have the same path.
3. A pool that claims what an older pool gets has a *rival*. Its route is accepted nevertheless; only the
   operator's status says that it gets no requests.

Pure. The cost grows with the number of claims. Routes that do not belong to pools are ignored.
"""

import json
from collections.abc import Iterator, Mapping

from perilune_operator.observe.facts import Listener, Object, PoolName, Rival
from perilune_operator.observe.readers import verdicts


def rivals(
    routes: Mapping[PoolName, Object], gateways: Mapping[str, Mapping[str, Listener]]
) -> dict[PoolName, Rival]:
    """Return the oldest rival of each pool that has one. `routes`: HTTPRoutes of pools. `gateways`:
    namespace/name → listeners by name, for the Gateways that are watched."""
    standing = {pool: route for pool, route in routes.items() if not _is_refused(route)}
    sections: dict[str, set[str]] = {}
    for route in standing.values():
        for gateway, section in _parents(route):
            sections.setdefault(gateway, {""}).add(section)
    listeners = {
        name: gateways[name] if name in gateways else dict.fromkeys(named, Listener())
        for name, named in sections.items()
    }
    taken: dict[tuple[str, str, str, str], PoolName] = {}
    found: dict[PoolName, dict[PoolName, set[str]]] = {}
    for pool in sorted(standing, key=lambda pool: (standing[pool]["metadata"]["creationTimestamp"], pool)):
        for gateway, listener, host in _claims(standing[pool], listeners):
            owner = taken.setdefault((gateway, listener, host, _matches(standing[pool])), pool)
            if owner != pool:
                found.setdefault(pool, {}).setdefault(owner, set()).add(host)
    firsts = {pool: next(iter(owners.items())) for pool, owners in found.items()}
    return {pool: Rival(owner, tuple(sorted(hosts - {""}))) for pool, (owner, hosts) in firsts.items()}


def _matches(route: Object) -> str:
    """Return which requests of a host the route takes. Routes that name other requests are no rivals; if two
    name the same request, the more specific match gets it."""
    return json.dumps([rule.get("matches") for rule in route["spec"].get("rules") or ()], sort_keys=True)


def _claims(route: Object, listeners: Mapping[str, Mapping[str, Listener]]) -> Iterator[tuple[str, str, str]]:
    """Yield Gateway, listener and host of each claim. `listeners`: by Gateway."""
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
    """Return the route's Gateways, each with a listener; an empty listener stands for all of them."""
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

"""The rules of a pool document that span several fields."""

import re
from collections import Counter
from ipaddress import ip_address

from perilune_api.policies import unknown_policy
from perilune_api.pool.document import Pool
from perilune_api.pool.endpoints import Role
from perilune_api.pool.engine import Selector
from perilune_api.pool.errors import SpecError
from perilune_api.pool.routing import Routing


def check(pool: Pool) -> None:
    """Check the rules that span several fields. Raises SpecError."""
    spec = pool.spec
    if not spec.model.name and spec.engine.selector is None:
        raise SpecError(
            "Name the model, as requests do: only engines that are selected tell it - at `$.spec.model.name`"
        )
    if spec.engine.tls is not None and not (spec.engine.tls.ca_file and spec.engine.tls.hostname):
        words = "Trust in engines needs caFile, and the hostname of their certificate"
        raise SpecError(f"{words} - at `$.spec.engine.tls`")
    _check_policies(spec.routing)
    if spec.engine.selector is not None:
        _check_ports(spec.engine.selector)
    seen: set[str] = set()
    for i, endpoint in enumerate(spec.endpoints):
        at = f"at `$.spec.endpoints[{i}]"
        if not _is_ip_port(endpoint.address):
            raise SpecError(f"{endpoint.address} is not a valid IP address and port - {at}.address`")
        if endpoint.address in seen:
            raise SpecError(f"Address {endpoint.address} is listed twice - {at}.address`")
        seen.add(endpoint.address)
        if endpoint.node and spec.topology.nodes and endpoint.node not in spec.topology.nodes:
            raise SpecError(
                f"Node {endpoint.node!r} is not one of {sorted(spec.topology.nodes)} - {at}.node`"
            )
        if endpoint.role is Role.PREFILL and not endpoint.bootstrap:
            raise SpecError(
                "An endpoint with the role prefill hands KV over, so it needs the address of its connector's"
                f" bootstrap page - {at}.bootstrap`"
            )
        if endpoint.peer and not _is_ip_port(endpoint.peer):
            raise SpecError(f"{endpoint.peer} is not a valid IP address and port - {at}.peer`")
        if endpoint.peer and any(other.bootstrap for other in spec.endpoints):
            raise SpecError(f"A pool's KV goes in one way: give bootstrap or peer - {at}.peer`")
        if endpoint.replay and len(endpoint.replay) != len(endpoint.events):
            raise SpecError(f"replay must have as many addresses as events - {at}.replay`")
    models = [spec.model.name, *spec.model.aliases, *(lora.name for lora in spec.model.loras)]
    for model, times in Counter(models).items():
        if times > 1:
            raise SpecError(f"Model name {model!r} is given twice - at `$.spec.model`")


def _check_policies(routing: Routing) -> None:
    policy, canary, shadows = routing.policy, routing.canary, routing.shadow.policies
    if not policy.is_known:
        raise SpecError(f"{unknown_policy(policy.name)} - at `$.spec.routing.policy.name`")
    if canary and not canary.policy.is_known:
        raise SpecError(f"{unknown_policy(canary.policy.name)} - at `$.spec.routing.canary.policy.name`")
    if canary and (canary.policy.name, canary.policy.parameters) == (policy.name, policy.parameters):
        words = "The canary is the pool's policy with the same parameters: remove it, or change one of them"
        raise SpecError(f"{words} - at `$.spec.routing.canary.policy`")
    for i, name in enumerate(shadows):
        if name in shadows[:i]:
            words = f"{name} is listed twice: leave one out"
            raise SpecError(f"{words} - at `$.spec.routing.shadow.policies[{i}]`")


def _check_ports(selector: Selector) -> None:
    seen = set()
    for i, port in enumerate((selector.port, *selector.further_ports)):
        at = f"at `$.spec.engine.selector.{f'furtherPorts[{i - 1}]' if i else 'port'}`"
        right = 0 < port < 65_536 if isinstance(port, int) else re.fullmatch(_PORT_NAME, port)
        if not right:
            words = f"{port!r} is neither the number of a port nor a name that a port of a pod may have"
            raise SpecError(f"{words} - {at}")
        if port in seen:
            raise SpecError(f"furtherPorts has port {port} twice, or that of `port` - {at}")
        seen.add(port)
    if selector.replay_port and not selector.events_port:
        raise SpecError("replayPort needs eventsPort - at `$.spec.engine.selector.replayPort`")


_PORT_NAME = r"(?=.*[a-z])[a-z0-9](-?[a-z0-9]){0,14}"


def _is_ip_port(address: str) -> bool:
    """Return whether the numbers of an `Address` are in range."""
    host, _, port = address.rpartition(":")
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return 0 < int(port) < 65_536

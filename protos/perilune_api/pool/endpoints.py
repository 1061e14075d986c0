"""`spec.endpoints`: the vLLM servers of a pool."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Struct

_IP_PORT = r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$"
Address = Annotated[str, Meta(pattern=_IP_PORT)]
"""`ip:port`; IPv6 in brackets."""
ZmqAddress = Annotated[str, Meta(pattern=r"^(tcp|ipc|inproc)://.+")]


class Role(StrEnum):
    """The part of the work that an endpoint does."""

    PREFILL = "prefill"
    """It prefills prompts for endpoints that decode, and gets no requests of clients."""
    DECODE = "decode"
    """It gets clients' requests, and fetches the KV of long prompts from an endpoint that prefills."""
    BOTH = "both"
    """It gets clients' requests, and like `decode` fetches the KV of long prompts where another endpoint has
    the role `prefill`."""


class EndpointSpec(Struct, frozen=True, kw_only=True):
    """One vLLM server."""

    address: Address
    """Address of its HTTP server: `ip:port`, with IPv6 in brackets."""
    node: str = ""
    """Name of the node that it runs on, one of topology.nodes. Empty if unknown; every transfer to or from it
    is then predicted at the speed of the widest level."""
    events: tuple[ZmqAddress, ...] = ()
    """ZMQ addresses of its KV events, one per data-parallel rank (`tcp://ip:port`). If empty, the gateway
    estimates what the endpoint caches from the requests that it routed there."""
    replay: tuple[ZmqAddress, ...] = ()
    """ZMQ addresses that replay missed events, in the order of `events`. If empty, missed events are not
    replayed."""
    first_rank: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Number of its first data-parallel rank among all ranks of its engine, where a server has a part of them
    (vLLM --data-parallel-hybrid-lb with --data-parallel-start-rank). Its metrics number ranks from it;
    requests number them from 0. `events` and `replay` are those of its own ranks."""
    draining: bool = False
    """Whether the endpoint drains: it keeps its sessions' requests and gets no new sessions."""
    ready: bool = True
    """Whether the endpoint may get requests. false: the gateway sends it none, but remembers what it
    caches."""
    bootstrap: Annotated[str, Meta(pattern=r"^$|" + _IP_PORT)] = ""
    """Address of the bootstrap page of its KV connector (vLLM's MooncakeConnector), `ip:port`. The gateway
    moves a session's KV between endpoints whose pages answer. If empty, it hands no KV over."""
    role: Role = Role.BOTH
    """prefill: it prefills long prompts for the other endpoints. decode and both: it gets clients' requests.
    An endpoint with the role `prefill` needs a bootstrap page."""
    peer: Annotated[str, Meta(pattern=r"^$|" + _IP_PORT)] = ""
    """Address at which other engines read its host memory, `ip:port`: the tier `p2p` of vLLM's
    OffloadingConnector, of vLLM >= 0.27. With several data-parallel ranks it is that of the first; the others
    have the next ports. If empty, others cannot read it. No endpoint of a pool has both this and
    `bootstrap`."""
    kv_name: str = ""
    """Names the model and the arguments that say what its KV means. KV goes only between endpoints of one
    name; an endpoint without a name is taken to be like all others."""
    superseded: bool = False
    """Whether the endpoint will soon be replaced: sessions that leave another one go elsewhere, as long as
    other endpoints have room."""
    asleep: bool | None = None
    """Whether its engine is to sleep (vLLM's sleep mode); the gateway has it sleep and wake. null: the
    gateway leaves it as it is."""
    instance: str = ""
    """Names what is at the address, such as the uid of a pod. An endpoint with another name at the same
    address is another one, and inherits nothing from the one before. If empty, the address alone names it."""

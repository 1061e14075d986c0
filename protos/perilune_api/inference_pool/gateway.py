"""`spec.gateway`: the pool's gateway, and how Envoy reaches it."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perilune_api.fields import Struct
from perilune_api.inference_pool.types import (
    Arguments,
    GatewayName,
    Host,
    Image,
    LogLevels,
    OptionalNamespace,
    OptionalObject,
    OptionalSection,
    PoolName,
    PullPolicy,
    Raw,
    Resources,
)


class GatewayMode(StrEnum):
    """Which objects make Envoy ask the gateway about each request."""

    AUTO = "auto"
    ENVOY_GATEWAY = "envoyGateway"
    INFERENCE_EXTENSION = "inferenceExtension"
    NONE = "none"


class ParentRef(Struct, frozen=True):
    """The Gateway (gateway.networking.k8s.io) that receives the clients' requests."""

    name: GatewayName
    """Name of the Gateway."""
    namespace: OptionalNamespace = ""
    """Namespace of the Gateway. The default is the pool's namespace."""
    section_name: OptionalSection = ""
    """Name of one listener of the Gateway. If empty, all listeners count."""


class TlsSpec(Struct, frozen=True):
    """TLS between Envoy and the gateway. Give a Secret, or an issuer of cert-manager, which writes one."""

    secret: OptionalObject = ""
    """Name of a Secret in the pool's namespace with tls.crt, tls.key and ca.crt, for the name
    POOL-gateway.NAMESPACE.svc. If empty, it is POOL-gateway-tls, which the issuer writes."""
    issuer: OptionalObject = ""
    """Name of an issuer of cert-manager, which writes and renews the Secret. If empty, you write it."""
    issuer_kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Kind of that issuer. An Issuer is in the pool's namespace."""
    ca_secret: OptionalObject = ""
    """Name of a Secret in the pool's namespace whose ca.crt has the CA certificates by which Envoy and the
    gateway trust each other. While a CA is replaced it has the old one and the new one. If empty, it is the
    Secret with the certificate, whose CA certificate changes together with the certificate."""
    client_certificates: bool = False
    """Whether the gateway also requires a certificate of Envoy, signed by a CA in ca.crt. With Envoy Gateway
    up to 1.9.1 it needs `engine.tls` too: its Envoys get no certificate for an external processor alone."""


class SharedStateSpec(Struct, frozen=True):
    """The server through which the pool's gateways share sessions and load, so that they act as one."""

    server: Annotated[
        str, Meta(max_length=512, pattern=r"^(rediss?://([A-Za-z0-9._-]+@)?[A-Za-z0-9.:\[\]-]+(/[0-9]+)?)?$")
    ] = ""
    """Address of Valkey, Redis, or another server of that protocol, redis://HOST:PORT or rediss://HOST:PORT,
    which is TLS; USER@ before HOST names a user of its ACL. If empty, it is the operator's, see managed."""
    managed: bool = True
    """Whether the operator runs a Valkey for the pool when several gateways may run and no server is named.
    false, and no server: gateways share nothing."""
    password_secret: OptionalObject = ""
    """Secret in the pool's namespace whose key password holds the server's password. If empty, the server
    needs none."""
    ca_secret: OptionalObject = ""
    """Secret in the pool's namespace whose key ca.crt holds the CA certificates of a rediss:// server. If
    empty, those of the image count."""
    tls: bool = True
    """Whether the operator's own server speaks TLS, with a certificate that the operator makes. Turn it off
    for a stateImage without TLS."""


class TracingSpec(Struct, frozen=True):
    """Where the gateway sends spans of requests, as OpenTelemetry has them."""

    endpoint: Annotated[str, Meta(max_length=512, pattern=r"^https?://[A-Za-z0-9.:\[\]/_-]+$")]
    """Address of a collector that takes OTLP over HTTP, such as http://HOST:4318."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of the requests without a client's trace that are sampled, 0 to 1. Where there is one, its flag
    decides."""


class GatewaySpec(Struct, frozen=True, kw_only=True):
    """The pool's gateway, which chooses the endpoint of each request, and how Envoy reaches it."""

    mode: GatewayMode = GatewayMode.AUTO
    """Which objects make Envoy ask the gateway. envoyGateway: those of Envoy Gateway. inferenceExtension: an
    InferencePool of the Gateway API inference extension. none: no objects, only the gateway itself runs.
    auto: envoyGateway if the cluster has its CRDs, else inferenceExtension if it has those, else none."""
    parent: ParentRef | None = None
    """Gateway that the pool's route is attached to. Without it, the gateway runs and no route is created."""
    hostnames: Annotated[tuple[Host, ...], Meta(max_length=16)] = ()
    """Host names whose requests belong to this pool. If empty, those of all hosts do. Two pools that share a
    Gateway need different host names."""
    matches: Annotated[tuple[Raw, ...], Meta(max_length=16)] = ()
    """Which requests of these hosts belong to this pool, as matches of an HTTPRoute's rule. If empty, those
    for paths below /v1 and for the few others that the gateway supports do (docs/limits.md)."""
    route: OptionalSection = ""
    """Name of an HTTPRoute of your own in the pool's namespace, which sends requests to the Service that is
    called like the pool (with serves: POOL-models), port 8000. The operator then creates none, and its
    policies are about yours; hostnames and matches count for nothing. Only with Envoy Gateway."""
    serves: Annotated[tuple[PoolName, ...], Meta(max_length=16)] = ()
    """Names of other pools in this namespace whose models this pool's gateway serves too, at this pool's host
    names: the model in a request's body chooses the pool. Each of them names this pool in servedBy. Needs
    failOpen: false, and Envoy Gateway."""
    served_by: OptionalObject = ""
    """Name of the pool in this namespace whose gateway serves this pool; that pool names this one in serves.
    This pool then has no gateway and no route of its own, and of spec.gateway only parent (the Gateway whose
    Envoys may connect to the engines) and clients count."""
    client_traffic_policy: Literal["create", "none"] = "create"
    """Whether the operator may create a ClientTrafficPolicy for the Gateway, if it is in the pool's namespace
    and has none. none: one of yours has to remove the header x-gateway-destination-endpoint early, or
    clients can choose their endpoint while no gateway answers."""
    tls: TlsSpec | None = None
    """TLS between Envoy and the gateway. Without it, session ids, prompts and headers cross the cluster's
    network in plain text."""
    replicas: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Number of gateway pods. Several share sessions and load, see state. With 0 no gateway runs, and
    failOpen says what happens to requests. Without it a new pool gets as many as the chart's gatewayReplicas,
    which is 2; one that exists keeps its number until rollout.revision lets it follow the operator."""
    state: SharedStateSpec | None = None
    """The server through which gateway pods share sessions and load. Without it the operator runs one when
    there may be several gateways."""
    tracing: TracingSpec | None = None
    """Where the gateway sends a span of each sampled request. Without it there are no spans."""
    fail_open: bool = True
    """What happens to requests while no gateway runs. true: they go to any ready endpoint. false: they are
    refused with 503."""
    image: Image = ""
    """Container image of the gateway. If empty, the operator's default is used."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled, as in a Kubernetes container."""
    log_level: LogLevels = "info"
    """Log level, optionally followed by levels of single modules: level[,module=level…]."""
    args: Arguments = ()
    """Further command-line arguments of perilune-gateway (see its --help), such as --transport=grpc or
    --decision-log=/data/$(POD_NAME).jsonl. Arguments that the operator sets are refused."""
    resources: Resources = Resources(requests={"cpu": "1", "memory": "1Gi"}, limits={"memory": "4Gi"})
    """Resources that the gateway's container requests."""
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the gateway's pod template like engine.podTemplate; the container is called gateway. Use it
    to mount a volume for model.tokenizer or for the decision log, or for a nodeSelector."""
    clients: Annotated[tuple[Raw, ...], Meta(max_length=16)] = ()
    """Who may connect to gateway and engines besides Envoy Gateway's Envoys of this Gateway, as peers of a
    NetworkPolicy: the Envoys of another implementation, or a job that talks to engines directly. With
    another mode than envoyGateway and without clients, anyone may."""
    min_replicas: Annotated[int, Meta(ge=1, le=100)] | None = None
    """Minimum number of gateway pods when a HorizontalPodAutoscaler scales them. Requires maxReplicas."""
    max_replicas: Annotated[int, Meta(ge=1, le=100)] | None = None
    """Maximum number of gateway pods. Together with minReplicas it creates a HorizontalPodAutoscaler, which
    scales the gateway by CPU."""

"""`spec.gateway`: the external processor that decides, and how requests come to it."""

from enum import StrEnum
from typing import Annotated

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
    OptionalSection,
    PullPolicy,
    Raw,
    Resources,
)


class GatewayMode(StrEnum):
    """How Envoy is told to ask our gateway."""

    AUTO = "auto"
    ENVOY_GATEWAY = "envoyGateway"
    INFERENCE_EXTENSION = "inferenceExtension"
    NONE = "none"


class ParentRef(Struct, frozen=True):
    """The Gateway (gateway.networking.k8s.io) that takes the clients' requests."""

    name: GatewayName
    """Name of the Gateway."""
    namespace: OptionalNamespace = ""
    """Namespace of the Gateway; empty: the pool's."""
    section_name: OptionalSection = ""
    """One listener of the Gateway; empty: all."""


class GatewaySpec(Struct, frozen=True):
    """The external processor that decides, and how requests come to it."""

    mode: GatewayMode = GatewayMode.AUTO
    """auto: what the cluster has: Envoy Gateway's objects where its CRDs are, else an InferencePool of the
    Gateway API inference extension where those are, else neither. none: only the gateway itself."""
    parent: ParentRef | None = None
    """Gateway that the pool's route is attached to; without one the gateway runs and no route is made."""
    hostnames: Annotated[tuple[Host, ...], Meta(max_length=16)] = ()
    """Hosts whose requests belong to this pool; needed where two pools share a Gateway."""
    replicas: Annotated[int, Meta(ge=0, le=100)] = 1
    """Gateway pods; each knows the sessions that it routed itself. 0: nobody decides, and failOpen counts."""
    fail_open: bool = True
    """true: without a gateway, requests go to any ready endpoint. false: they get 503."""
    image: Image = ""
    """Container image of the gateway; empty: the operator's own."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled, as in a container."""
    log_level: LogLevels = "info"
    """Log level, and levels of single modules: level[,module=level…]."""
    args: Arguments = ()
    """Further arguments of perilune-gateway (see its --help), such as --transport=grpc or
    --decision-log=/data/$(POD_NAME).jsonl. Those that the operator sets itself are refused."""
    resources: Resources = Resources(requests={"cpu": "1", "memory": "1Gi"}, limits={"memory": "4Gi"})
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the gateway's pod template like engine.podTemplate; its container is called gateway. For a
    volume with model.tokenizer's folder or for the decision log, imagePullSecrets, a nodeSelector."""
    min_replicas: Annotated[int, Meta(ge=1, le=100)] | None = None
    """With maxReplicas: fewest gateways."""
    max_replicas: Annotated[int, Meta(ge=1, le=100)] | None = None
    """With minReplicas: a HorizontalPodAutoscaler by CPU sets the number of gateways."""

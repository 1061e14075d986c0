"""The pool document as a whole."""

from typing import Literal

from perilune_api.fields import Name, Struct
from perilune_api.pool.endpoints import EndpointSpec
from perilune_api.pool.engine import Engine
from perilune_api.pool.model import Model
from perilune_api.pool.routing import Routing
from perilune_api.pool.topology import Topology


class Spec(Struct, frozen=True):
    """The pool: its model, engines, routing, fabric and endpoints."""

    model: Model = Model()
    engine: Engine = Engine()
    routing: Routing = Routing()
    topology: Topology = Topology()
    endpoints: tuple[EndpointSpec, ...] = ()
    """Static list of endpoints. On Kubernetes it is empty: the gateway watches the engine pods instead."""


class Metadata(Struct, frozen=True):
    """Names the pool."""

    name: Name
    """Name of the pool in logs and metrics."""
    namespace: Name = "default"
    """Namespace of the pool in logs and metrics."""


class Pool(Struct, frozen=True):
    """A whole pool document."""

    metadata: Metadata
    spec: Spec
    api_version: Literal["perilune.dev/v1alpha1"] = "perilune.dev/v1alpha1"
    kind: Literal["InferencePool"] = "InferencePool"

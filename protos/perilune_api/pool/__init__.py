"""The pool document: what a gateway must know about one pool.

It is one YAML (or JSON) document in the shape of the Kubernetes `InferencePool`. On Kubernetes the operator
derives it from the `InferencePool`. Without Kubernetes a user writes it, with a static list
`spec.endpoints`; `examples/local/pool.yaml` is an example with comments.

    document.py    the document as a whole; its parts are in
                     model.py, engine.py, topology.py, endpoints.py, and for `spec.routing`
                     routing.py, sessions.py, refusals.py, migration.py, transfers.py, trying.py
    reading.py     YAML → frozen structs, or a SpecError that names the field
    checks.py      the rules that span several fields, such as duplicate addresses and unknown nodes
    errors.py      SpecError

`parse` refuses an unknown field or a wrong value with the field's path:

    SpecError: Expected `int` >= 1 - at `$.spec.engine.blockSize`

`parse_known` reads what the operator wrote, and ignores unknown fields. Users of the package import from
here; structs with more than five fields take keywords only.
"""

from perilune_api.pool.checks import check
from perilune_api.pool.document import Metadata, Pool, Spec
from perilune_api.pool.endpoints import Address, EndpointSpec, Role, ZmqAddress
from perilune_api.pool.engine import CostModel, Engine, EngineTls, ExtraKeys, HashAlgorithm, Hashing, Selector
from perilune_api.pool.errors import SpecError
from perilune_api.pool.migration import Migration, MoveTrigger
from perilune_api.pool.model import LONGEST_CONTEXT, Lora, Model
from perilune_api.pool.reading import MAX_DEPTH, dump, load, parse, parse_known
from perilune_api.pool.refusals import Ejection, Limits
from perilune_api.pool.routing import DECISION_S, EnginePriority, Routing
from perilune_api.pool.sessions import SessionAdmission, SessionKeys
from perilune_api.pool.topology import NodePlace, Topology
from perilune_api.pool.transfers import Disaggregation, Pull
from perilune_api.pool.trying import Canary, Shadow

__all__ = [
    "DECISION_S",
    "LONGEST_CONTEXT",
    "MAX_DEPTH",
    "Address",
    "Canary",
    "CostModel",
    "Disaggregation",
    "Ejection",
    "EndpointSpec",
    "Engine",
    "EnginePriority",
    "EngineTls",
    "ExtraKeys",
    "HashAlgorithm",
    "Hashing",
    "Limits",
    "Lora",
    "Metadata",
    "Migration",
    "Model",
    "MoveTrigger",
    "NodePlace",
    "Pool",
    "Pull",
    "Role",
    "Routing",
    "Selector",
    "SessionAdmission",
    "SessionKeys",
    "Shadow",
    "Spec",
    "SpecError",
    "Topology",
    "ZmqAddress",
    "check",
    "dump",
    "load",
    "parse",
    "parse_known",
]

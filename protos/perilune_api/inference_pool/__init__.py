"""The Kubernetes object `InferencePool` as users write it.

Its structs extend those of the pool document (`perilune_api.pool`), and `document.py` derives the document
from the object. The smallest useful pool has ten lines: `examples/smallest.yaml`.

    spec.py      the desired state; its parts are in engine.py, mooncake.py, topology.py and gateway.py
    status.py    the observed state, which the operator writes
    types.py     field types that several parts use
    checks.py    converts and checks an object's spec; arguments.py checks command-line flags, and
                 selected.py what a pool with engine.selector may not ask for
    document.py  derives the gateway's pool document

The API server refuses wrong types, ranges, enum values and broken CEL rules (`perilune_api.crd`) before it
stores an object. The operator reports everything else that is wrong (`checks.py`) as the condition
Accepted=False with the field's path. `perilune_api.crdgen` generates the CustomResourceDefinition from these
structs; `kubectl explain ipool.spec` prints their docstrings.
"""

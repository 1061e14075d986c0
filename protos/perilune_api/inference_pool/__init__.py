"""`InferencePool` as users write it: everything that turns a model's name into served requests.

A superset of the pool document (`perilune_api.pool`): the gateway's parts are its structs, extended. The
operator resolves one into the other (`document.py`). The smallest useful pool is ten lines,
`examples/smallest.yaml`.

    spec.py      what a pool should be, of: engine, mooncake, topology, gateway, and the pool document's
                 routing
    status.py    what it is, written by the operator
    types.py     kinds of fields that several parts have
    checks.py    an object's spec ─▶ checked structs; arguments.py: which flags of programs are refused
    document.py  spec and fabric ─▶ the pool document that the gateway reads

Who refuses what: types, ranges, enums and the rules of `perilune_api.crd` (CEL) are the API server's, before
anything is stored; what those cannot know (`checks.py`) the operator shows as condition Accepted=False with
the field's path. `perilune_api.crdgen` makes the CustomResourceDefinition of these structs: their docstrings
are what `kubectl explain ipool.spec` prints.
"""

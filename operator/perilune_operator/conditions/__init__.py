"""What can be said of a pool: one function a condition, each `(facts) → Fact`, none of which knows another.

`workloads.py` reads what runs (nodes, engines, store, gateway, what changes and what leaves), `route.py` how
requests come to it. `perilune_operator.status` puts them together. Pure.
"""

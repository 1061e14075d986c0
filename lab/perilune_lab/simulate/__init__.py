"""The simulator: a gateway's own code in front of modelled engines, in virtual time.

    workload ─▶ Router, PoolState, hand-offs, session admission ─▶ scheduler and KV cache of the lab's engine
                  ▲                                                     │
                  └────── KV events, metrics, ends of answers ◀─────────┘

What decides is what a gateway runs (`routing/new_router.py`). What is modelled is what it decides about: the
time that an H20 takes (`h20`), the links between engines and the shared store (`transfers`). The deployment
is a pool document (`deployment`), so nothing can be simulated that a pool cannot be. Every figure says that
it is simulated, and names its deployment.
"""

"""What the gateway observes beside requests.

the pool document     pool_file (a file), kubernetes (the API server and the pool's pods)
engines' KV caches    kv_feed follows one publisher (kv_events decodes its messages, kv_sequence finds missing
                      ones, turn_budget leaves time for requests); pool_events runs the feeds of the pool
engines' load         engine_metrics

`drained` goes the other way: it reports drained engines to the operator.
"""

"""What the gateway hears of beside requests, and from whom.

the pool document     pool_file (a file), kubernetes (the API server, and the pool's pods)
engines' caches       kv_feed, of one engine (kv_events reads its messages, kv_sequence finds what is
                      missing, turn_budget leaves time for requests) ─▶ pool_events, of all of the pool
engines' load         engine_metrics
and to the operator   drained: the only one that tells something
"""

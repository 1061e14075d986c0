"""What the gateway hears of beside requests, and from whom.

    the pool document     pool_file (a file), kubernetes (the API server, and the pool's pods)
    engines' caches       kv_feed (one engine: kv_events reads its messages, kv_sequence finds what is missing,
                          turn_budget keeps it from holding up requests) ─▶ pool_events (all of the pool's)
    engines' load         engine_metrics
    and to the operator   drained: the only one that tells something
"""

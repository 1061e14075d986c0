"""What the gateway observes apart from requests.

the pool document     pool_file (a file), kubernetes (the API server and the pool's pods)
engines' KV caches    kv_feed follows one publisher (zmq_sockets reads its messages, kv_events decodes them,
                      kv_sequence finds missing ones, kv_replay asks for those, kv_rank applies all in order,
                      turns leaves time for requests); pool_events runs the feeds of the pool
engines' load         engine_metrics

`drained` goes the other way: it says which drained engines the operator may remove.
"""

"""One simulated vLLM server per process.

    http ─ inbound, words ─▶ Request ─▶ service (wall time) ─▶ scheduler (virtual time) ─▶ kv_cache ─▶ hashing
      ▲        answers ◀── tokens ────────┤                        └─▶ store (shared pool)
                                          ├─▶ connector (KV handed to and fetched from other engines)
                                          ├─▶ events (ZMQ, replay)
                                          └─▶ metrics, request log

scheduler, kv_cache, hashing, store and the event encoding are pure state with time passed in, and held to
captures of vLLM 0.32: for the recorded requests they answer the same `cached_tokens` and announce the same
batches. Hashing, cache and events share nothing with the gateway, so their agreement is a test of both.

Limits: one data-parallel rank, one KV cache group, text only; one prompt and one answer per request. Answers
are made up, and so is their length unless the request sets it. The store neither delays nor loses a put.
"""

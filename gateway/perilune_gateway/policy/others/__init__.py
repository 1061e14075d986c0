"""Policies of other systems as published, for comparison and for users who know those systems.

    mooncake                     Mooncake's Algorithm 1
    conductor                    Mooncake Conductor's prefill schedule, with the rules of near_cache.py
    dynamo                       the present cost of NVIDIA Dynamo's router
    dynamo_product               the cost that was proposed for Dynamo's router
    dynamo_v1                    the first cost of Dynamo's router
    lmetric, lmetric_plus_one    LMetric's product, and the product with one more request
    kv_linear                    the weighted sum of hit ratio and load that many routers use
    llm_d                        the default scorers of llm-d and of the inference extension's endpoint picker

A pool chooses them with `routing.policy.name` like any other policy. Each file says where it differs from its
source.
"""

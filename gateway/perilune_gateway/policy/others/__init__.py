"""Policies of other systems, as published, to compare with and to choose where one knows them.

    mooncake, conductor          Mooncake's Algorithm 1; Mooncake Conductor's schedule (with near_cache.py)
    dynamo, dynamo_product,      NVIDIA Dynamo's costs: the present one, the one proposed to it, the first
    dynamo_v1
    lmetric, lmetric_plus_one    LMetric's product, and the same with one request more
    kv_linear                    the weighted sum that most routers ship

They are live like ours: a pool names them in `routing.policy.name`. Each file says where it departs from its
source.
"""

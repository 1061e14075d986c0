"""Spec and facts → Kubernetes objects. Pure.

engines.py              the engines' workloads, Service, disruption budget and autoscaler
    endpoints.py            roles, names, GPUs and nodes of an endpoint
    engine_process.py       the program in an engine's container
    drain_hook.py           how an engine ends
    placement.py            where its pods go
mooncake.py             the KV store that engines share
gateway.py              the gateway, and how it is reached by Envoy: routing.py
network_policies.py     who may connect to whom
monitors.py             what Prometheus scrapes
objects.py              what all objects share: names, labels, owner, security, resources
pod_template.py         a user's podTemplate, laid over the operator's
"""

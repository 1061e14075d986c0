"""Spec and facts → Kubernetes objects. Pure.

engines.py              the engines' workloads, Service, disruption budget and autoscaler
    endpoints.py            workload, GPUs and nodes of an endpoint
    engine_process.py       the program in an engine's container
    sizes.py                what its pods need, by the size of the model
    model_cache.py          where they find the model
    drain_hook.py           the preStop hook, which waits for running requests
    placement.py            where its pods run
mooncake.py             the KV store that engines share
gateway.py              the gateway
    tls.py                  its certificate, and how Envoy trusts it
routing.py              how Envoy reaches the gateway and the engines
network_policies.py     which pods may connect to which
monitors.py             what Prometheus scrapes
objects.py              what all objects share: labels, owner, security, resources
pod_template.py         a user's podTemplate, laid over the operator's
"""

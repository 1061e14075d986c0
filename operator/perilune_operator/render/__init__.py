"""Spec and facts → Kubernetes objects. Pure.

    engines.py (with endpoints, engine_process, drain_hook, placement)    what serves
    mooncake.py                     the store that engines share
    gateway.py                      who decides
    routing.py                      how requests come there
    network_policies.py, monitors.py    who may talk to whom, who scrapes

`objects.py` has what all of them share: the context, names and labels, security, resources; `pod_template.py`
lays a user's podTemplate over ours.
"""

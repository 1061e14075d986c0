"""The server through which a pool's gateways share their state: what each gateway is told of it.

The kubelet passes the password and mounts the CA, so the operator reads no Secret.
"""

from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import Context

FOLDER = "/etc/perilune/state"
PASSWORD = "password"
"""Key of the Secret that holds the password."""


def args(pool: Context) -> list[str]:
    """The gateway's arguments."""
    state = pool.spec.gateway.state
    if state is None:
        return []
    return [f"--state-server={state.server}", *([f"--state-ca={FOLDER}/ca.crt"] if state.ca_secret else [])]


def env(pool: Context) -> list[Object]:
    """The gateway's environment variable with the password."""
    state = pool.spec.gateway.state
    if state is None or not state.password_secret:
        return []
    password = {"name": state.password_secret, "key": PASSWORD}
    return [{"name": "PERILUNE_STATE_PASSWORD", "valueFrom": {"secretKeyRef": password}}]


def volumes(pool: Context) -> list[Object]:
    state = pool.spec.gateway.state
    return [{"name": "state", "secret": {"secretName": state.ca_secret}}] if state and state.ca_secret else []


def mounts(pool: Context) -> list[Object]:
    return [{"name": "state", "mountPath": FOLDER, "readOnly": True}] if volumes(pool) else []

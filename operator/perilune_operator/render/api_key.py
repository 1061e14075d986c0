"""The key that engines demand of requests (`engine.apiKey`): environment variables of engines and gateways.

The kubelet reads the Secret, so the operator reads none.
"""

from perilune_api import names
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import Context

GATEWAY_VARIABLE = "PERILUNE_ENGINE_API_KEY"


def of_engine(pool: Context) -> list[Object]:
    return _variable(pool, names.ENGINE_KEY_VARIABLE)


def of_gateway(pool: Context) -> list[Object]:
    return _variable(pool, GATEWAY_VARIABLE)


def _variable(pool: Context, name: str) -> list[Object]:
    given = pool.spec.engine.api_key
    if given is None:
        return []
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": given.secret, "key": given.key}}}]

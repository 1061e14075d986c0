"""The longest names that a pool and its Gateway may have: all that is made of them is taken."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from perilune_api.inference_pool.checks import convert
from perilune_api.kube import APPLY, Client
from perilune_operator.kinds import (
    ENVOY_GATEWAY,
    EVERYWHERE,
    GATEWAY_API,
    INFERENCE,
    OPTIONAL,
    full_name,
    path,
)
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
POOL = "p" * 45
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
SERVED = {GATEWAY_API, ENVOY_GATEWAY, INFERENCE}
"""Groups of the server's CRDs."""
KNOWN = frozenset(full_name(kind) for kinds in OPTIONAL.values() for kind in kinds)


def objects(gateway: str, mode: str) -> tuple[Object, ...]:
    spec = {
        "model": {"name": "m"},
        "mooncake": {"store": {"enabled": True}},
        "gateway": {"mode": mode, "parent": {"name": gateway}, "minReplicas": 1, "maxReplicas": 2},
    }
    made = plan(
        POOL, "n" * 63, convert(spec), Observed(uid="u", generation=1, kinds=KNOWN), 0.0, Defaults()
    ).objects
    assert made is not None
    return made


def labels_in(value: Any) -> Iterator[str]:
    """Values of whatever is called labels or selects by them."""
    for key, inside in value.items() if isinstance(value, dict) else ():
        if key in ("labels", "matchLabels", "selector") and all(isinstance(v, str) for v in inside.values()):
            yield from inside.values()
        yield from labels_in(inside)
    for inside in value if isinstance(value, list) else ():
        yield from labels_in(inside)


GATEWAYS = [
    pytest.param("g" * 63, id="as long as a label"),
    pytest.param("g" * 64, id="longer than a label"),
    pytest.param(".".join(["g" * 60] * 4), id="as long as may be"),
]
MODES = ["envoyGateway", "inferenceExtension"]


@pytest.mark.parametrize("gateway", GATEWAYS)
@pytest.mark.parametrize("mode", MODES)
def test_the_longest_pool_name_makes_valid_names(gateway: str, mode: str) -> None:
    made = objects(gateway, mode)
    assert {o["kind"] for o in made} >= {"Service", "Deployment", "HTTPRoute", "NetworkPolicy"}
    for obj in made:
        assert len(obj["metadata"]["name"]) <= (63 if obj["kind"] == "Service" else 253)
        assert [value for value in labels_in(obj) if not LABEL.fullmatch(value)] == []


@pytest.mark.parametrize("gateway", GATEWAYS)
@pytest.mark.parametrize("mode", MODES)
async def test_a_real_api_server_takes_them(routed: tuple[Client, str], gateway: str, mode: str) -> None:
    client, namespace = routed
    for obj in objects(gateway, mode):
        if obj["kind"] in EVERYWHERE or obj["apiVersion"].partition("/")[0] in SERVED:
            here = {**obj, "metadata": {**obj["metadata"], "namespace": namespace}}
            params = {"fieldManager": "test", "dryRun": "All", "fieldValidation": "Strict"}
            await client.request("PATCH", path(here), here, params=params, content_type=APPLY)

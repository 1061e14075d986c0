"""Which optional APIs the cluster has, while its API server starts and stops."""

from typing import Any

import pytest

from perilune_api import kube
from perilune_operator.kinds import OPTIONAL
from perilune_operator.observe import discovery
from perilune_operator.observe.discovery import GONE_AFTER, Discovery, until_served

Object = dict[str, Any]


class Api:
    """An API server's discovery."""

    def __init__(self) -> None:
        self.status = 200

    async def request(self, method: str, path: str) -> Object:
        if self.status != 200:
            raise kube.ApiError(self.status, "NotFound", path)
        return {"resources": [{"kind": kind} for kind in OPTIONAL[path.removeprefix("/apis/")]]}


@pytest.fixture
def api() -> Any:
    return Api()


@pytest.mark.parametrize("status", [pytest.param(404, id="not known yet"), pytest.param(503, id="starting")])
async def test_an_api_server_that_starts_takes_no_kind_away(api: Any, status: int) -> None:
    discovery = Discovery(api)
    assert await discovery.ask()
    everything = discovery.kinds
    assert everything is not None
    assert len(everything) > 5
    for _ in range(2):
        api.status = status
        for _ in range(GONE_AFTER - 1):
            assert not await discovery.ask()
        api.status = 200
        assert not await discovery.ask()
    assert discovery.kinds == everything


async def test_a_kind_that_stays_away_is_gone(api: Any) -> None:
    discovery = Discovery(api)
    await discovery.ask()
    api.status = 404
    assert [await discovery.ask() for _ in range(GONE_AFTER)] == [*[False] * (GONE_AFTER - 1), True]
    assert discovery.kinds == frozenset()


async def test_a_cluster_without_optional_kinds_is_known_too(api: Any) -> None:
    discovery = Discovery(api)
    assert discovery.kinds is None
    api.status = 404
    assert await discovery.ask()
    assert discovery.kinds == frozenset()


POOLS = ("perilune.dev/v1alpha1", "inferencepools")
GROUP, RESOURCE = {"name": "perilune.dev"}, {"name": "inferencepools"}


class Starting:
    """An API server that starts: what it answers to one look after the other."""

    def __init__(self, *looks: tuple[Any, Any]) -> None:
        self.looks = list(looks)

    async def request(self, method: str, path: str) -> Object:
        groups, resources = self.looks[0]
        answer = groups if path == "/apis" else resources
        if answer is not groups or isinstance(answer, Exception):
            self.looks.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"groups" if path == "/apis" else "resources": answer}


async def test_an_operator_waits_until_an_api_server_that_starts_serves_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kopf, which looks once only, is not to look before."""
    monkeypatch.setattr(discovery, "WAIT_S", 0.0)
    api: Any = Starting(
        (OSError("connection refused"), None),
        (kube.ApiError(503, "ServiceUnavailable", "starting"), None),
        (kube.ApiError(429, "TooManyRequests", "starting"), None),
        (kube.ApiError(401, "Unauthorized", "tokens are not known yet"), None),
        (kube.ApiError(403, "Forbidden", "rights are not known yet"), None),
        ([], kube.ApiError(404, "NotFound", "no such group")),
        ([GROUP], []),
        ([], [RESOURCE]),
        ([GROUP], [RESOURCE]),
        ([], []),
    )
    await until_served(api, *POOLS)
    assert len(api.looks) == 1, "it looks no further"

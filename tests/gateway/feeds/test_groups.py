"""Engines that span nodes: each rank publishes its KV events at the pod of its group that runs it."""

from typing import Any

import pytest

from perilune_api import names
from perilune_api.pool import Metadata, Model, Pool, Spec
from perilune_api.pool.engine import Engine, Selector
from perilune_gateway.feeds.kubernetes import with_pods

Object = dict[str, Any]
EVENTS = '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5600"}'


def pod(group: int, index: int, *args: str, ip: str | None = None, **annotations: str) -> Object:
    """`ip`: None for one that tells the group and the number in it."""
    return {
        "metadata": {
            "name": f"p-engine-{group}-{index}",
            "uid": f"u{group}{index}",
            "labels": {
                names.COMPONENT_LABEL: "engine" if index == 0 else "engine-worker",
                names.GROUP_SET: "p-engine",
                names.GROUP_INDEX: str(group),
                names.WORKER_INDEX: str(index),
            },
            "annotations": annotations,
        },
        "spec": {"nodeName": "n", "containers": [{"name": "engine", "args": list(args)}]},
        "status": {
            "podIP": f"10.0.{group}.{index}" if ip is None else ip,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


NOTED = {names.EVENTS_PORT: "5557", names.RANKS: "4", names.RANKS_PER_POD: "2"}


def noted(group: int, index: int, ip: str | None = None) -> Object:
    return pod(group, index, ip=ip, **NOTED)


def pool(selector: Selector | None = None) -> Pool:
    return Pool(Metadata("p", "ns"), Spec(Model(name="m"), engine=Engine(selector=selector)))


def test_each_rank_publishes_at_its_own_pod_of_the_group() -> None:
    pods = [noted(group, index) for group in (1, 0) for index in (1, 0)]
    first, second = with_pods(pool(), pods).spec.endpoints
    assert (first.address, first.instance) == ("10.0.0.0:8000", "u00")
    assert first.events == (
        "tcp://10.0.0.0:5557",
        "tcp://10.0.0.0:5558",
        "tcp://10.0.0.1:5559",
        "tcp://10.0.0.1:5560",
    )
    assert first.replay == tuple(url[:-4] + str(int(url[-4:]) + 4) for url in first.events)
    assert second.events[2:] == ("tcp://10.0.1.1:5559", "tcp://10.0.1.1:5560")


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="not made yet"),
        pytest.param([noted(0, 1, ip="")], id="not started yet"),
        pytest.param([noted(1, 1)], id="of another group"),
    ],
)
def test_a_group_without_all_of_its_pods_is_no_endpoint(others: list[Object]) -> None:
    assert with_pods(pool(), [noted(0, 0), *others]).spec.endpoints == ()


def test_selected_engines_have_ranks_in_headless_pods_too() -> None:
    args = ("--kv-events-config", EVENTS, "-dp=3", "-dpl=1")
    pods = [pod(0, 0, *args), pod(0, 1, *args, "--headless"), pod(0, 2, *args, "--headless")]
    selected = pool(Selector(labels={"app": "vllm"}))
    (found,) = with_pods(selected, pods).spec.endpoints
    assert found.events == ("tcp://10.0.0.0:5557", "tcp://10.0.0.1:5558", "tcp://10.0.0.2:5559")
    (alone,) = with_pods(selected, pods[:1]).spec.endpoints
    assert alone.events == (), "where the selector leaves out the others, what they cache is estimated"

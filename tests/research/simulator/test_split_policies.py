"""The two policies that prefill on one endpoint and decode on another, by hand."""

from random import Random

import pytest
import routing_objects
from msgspec import structs
from msgspec.structs import replace
from routing_objects import request, session

from perilune_api.policies import PolicyParams
from perilune_api.pool import Role
from perilune_gateway.model import Candidate, Decision, Endpoint, Reason
from perilune_research.simulator.policies import POLICIES, SPLIT
from perilune_research.simulator.policies.dynamo_disagg import QueuedPrefill


def candidate(address: str, *, role: Role = Role.BOTH, **facts) -> Candidate:
    return structs.replace(
        routing_objects.candidate(address, **facts), endpoint=Endpoint(address=address, role=role)
    )


def run(name: str, candidates, r=None) -> Decision:
    verdict = POLICIES[name](r or request(tokens=1000), candidates, PolicyParams(), Random(0))
    assert isinstance(verdict, Decision)
    return verdict


def test_static_pd_least_loaded_prefill_and_most_free_kv() -> None:
    nodes = [
        candidate("a", role=Role.PREFILL, pending=5),
        candidate("b", role=Role.PREFILL, pending=3),
        candidate("c", role=Role.DECODE, kv_free=7),
        candidate("d", role=Role.DECODE, kv_free=8),
    ]
    verdict = run("static_pd", nodes)
    assert (verdict.prefill, verdict.target, verdict.reason) == ("b", "d", Reason.SPLIT)


def test_static_pd_with_one_endpoint_is_no_split() -> None:
    verdict = run("static_pd", [candidate("a")])
    assert (verdict.prefill, verdict.target, verdict.reason) == ("", "a", Reason.LEAST_LOADED)


@pytest.mark.parametrize(
    ("cached", "queue", "remote"),
    [(0, 0, True), (0, 1, True), (0, 2, False), (600, 0, False), (599, 0, True)],
    ids=["long", "queue of one", "queue full", "1000 uncached", "1001 uncached"],
)
def test_dynamo_disagg_prefills_remotely_what_is_long_while_the_queue_is_short(
    cached: int, queue: int, remote: bool
) -> None:
    nodes = [candidate("p", role=Role.PREFILL), candidate("d", role=Role.DECODE, cached=cached)]
    verdict = run("dynamo_disagg", nodes, replace(request(tokens=1600), prefill_queue=queue))
    assert (verdict.target, isinstance(verdict, QueuedPrefill)) == ("d", remote)
    assert verdict.prefill_endpoint == ("" if remote else "d")
    assert verdict.reason is (Reason.SPLIT if remote else Reason.LOWEST_COST)


def test_dynamo_disagg_without_prefill_endpoints_is_local() -> None:
    alone = run("dynamo_disagg", [candidate("a")], request(tokens=9000))
    assert not isinstance(alone, QueuedPrefill)


@pytest.mark.parametrize("name", SPLIT)
def test_an_empty_prompt_is_routed_too(name: str) -> None:
    nodes = [candidate("a", role=Role.PREFILL), candidate("b", role=Role.DECODE)]
    assert run(name, nodes, request(tokens=0, of=session(""))).target == "b"

"""Data-parallel ranks: each has its own cache and load, and the request says which one serves."""

import pytest
from prometheus_client import generate_latest
from router_rig import Rig, pool
from routing_objects import head

from perilune_api.policies import PolicyChoice, PolicyName
from perilune_api.pool import EndpointSpec, Routing
from perilune_gateway.model import Outcome

SERVERS = ("10.0.0.1:8000", "10.0.0.2:8000")


@pytest.fixture
def ranked() -> Rig:
    def server(address: str) -> EndpointSpec:
        return EndpointSpec(address=address, events=(f"tcp://{address}0", f"tcp://{address}1"))

    routing = Routing(policy=PolicyChoice(name=PolicyName.PERILUNE))
    return Rig(pool(endpoints=[server(address) for address in SERVERS], routing=routing))


def in_flight(rig: Rig) -> dict[str, int]:
    return {v.endpoint.address: v.load.in_flight for v in rig.state.fleet.view(rig.now)}


def test_the_rank_that_holds_the_prompt_is_chosen_and_named(ranked: Rig) -> None:
    ranked.stored("10.0.0.2:8000#1", range(400))
    routed = ranked.route(range(440))
    assert (routed.destinations[0], routed.rank) == ("10.0.0.2:8000", 1)
    assert ranked.record(routed).cached_tokens == 400


def test_load_is_counted_for_each_rank(ranked: Rig) -> None:
    for first in range(0, 4000, 1000):
        ranked.route(range(first, first + 100))
    assert in_flight(ranked) == {f"{server}#{rank}": 1 for server in SERVERS for rank in (0, 1)}


def test_a_session_stays_with_its_rank(ranked: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    first = ranked.route(range(40), h)
    ranked.finish(first)
    second = ranked.route(range(60), h)
    assert (second.destinations[0], second.rank) == (first.destinations[0], first.rank)


def test_fallbacks_serve_with_the_same_rank(ranked: Rig) -> None:
    """Envoy sends them the same headers. Another rank of the server that failed would fail too."""
    routed = ranked.route(range(40))
    other = next(server for server in SERVERS if server != routed.destinations[0])
    assert routed.destinations == (routed.destinations[0], other)
    ranked.router.on_response(routed.ticket, 200, other, True)
    assert {address for address, count in in_flight(ranked).items() if count} == {f"{other}#{routed.rank}"}
    ranked.finish(routed, Outcome.COMPLETED)


def test_a_part_of_an_engines_ranks_is_named_by_requests_as_its_server_counts() -> None:
    """With hybrid balancing a server serves, say, ranks 4 and 5 of 8. Its requests call them 0 and 1, its
    metrics 4 and 5."""
    parts = [
        EndpointSpec(address=address, events=(f"tcp://{address}0", f"tcp://{address}1"), first_rank=first)
        for address, first in zip(SERVERS, (0, 4), strict=True)
    ]
    rig = Rig(pool(endpoints=parts, routing=Routing(policy=PolicyChoice(name=PolicyName.PERILUNE))))
    rig.stored("10.0.0.2:8000#1", range(400))
    routed = rig.route(range(440))
    assert (routed.destinations[0], routed.rank) == ("10.0.0.2:8000", 1)
    called = {e.address: e.engine_rank for e in rig.state.fleet.endpoints()}
    assert called == {
        f"{a}#{rank}": first + rank for a, first in zip(SERVERS, (0, 4), strict=True) for rank in (0, 1)
    }
    assert rig.state.fleet.engine_rank("10.0.0.2:8000#1") == 5


def test_a_server_without_ranks_gets_no_rank(rig: Rig) -> None:
    assert rig.route(range(40)).rank is None


def test_a_subset_hint_names_servers(ranked: Rig) -> None:
    h = head("/v1/completions")
    h.subset = frozenset({SERVERS[1]})
    assert ranked.route(range(40), h).destinations == (SERVERS[1],)


def test_metrics_name_the_rank(ranked: Rig) -> None:
    ranked.stored("10.0.0.2:8000#1", range(400))
    ranked.finish(ranked.route(range(440)))
    text = generate_latest(ranked.metrics.registry).decode()
    assert 'endpoint="10.0.0.2:8000#1"' in text

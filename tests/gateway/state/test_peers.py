"""Which other replicas are alive."""

from perilune_gateway.state.peers import LEASE_S, Peers


def test_a_replica_is_alive_for_its_lease() -> None:
    peers = Peers("b")
    peers.hear("c", 10.0)
    assert "c" in peers
    assert peers.late(10.0 + LEASE_S) == []
    assert peers.late(10.1 + LEASE_S) == ["c"]
    peers.forget("c")
    assert "c" not in peers


def test_the_replica_with_the_least_id_is_the_first() -> None:
    peers = Peers("b")
    assert peers.this_is_first
    peers.hear("c", 0.0)
    assert peers.this_is_first
    peers.hear("a", 0.0)
    assert not peers.this_is_first

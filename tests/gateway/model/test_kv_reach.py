"""What a pool document says about the ways of KV between engines."""

import pytest

from perilune_api.pool import EndpointSpec, Engine, Model, Spec
from perilune_gateway.model.kv_reach import KvReach, kv_reach


@pytest.mark.parametrize(
    ("bootstrap", "store", "reach"),
    [
        ("", False, KvReach()),
        ("10.0.0.1:8998", False, KvReach(hands_over=True)),
        ("", True, KvReach(stores=True)),
        ("10.0.0.1:8998", True, KvReach(hands_over=True, stores=True)),
    ],
)
def test_bootstrap_pages_hand_over_and_a_store_stores(bootstrap: str, store: bool, reach: KvReach):
    endpoints = (
        EndpointSpec(address="10.0.0.1:8000", bootstrap=bootstrap),
        EndpointSpec(address="10.0.0.2:8000"),
    )
    assert kv_reach(Spec(Model(name="m"), Engine(store=store), endpoints=endpoints)) == reach


def test_an_address_for_peers_lets_them_read():
    endpoints = (
        EndpointSpec(address="10.0.0.1:8000", peer="10.0.0.1:5710"),
        EndpointSpec(address="10.0.0.2:8000"),
    )
    assert kv_reach(Spec(Model(name="m"), endpoints=endpoints)) == KvReach(reads_peers=True)

"""Aliases tell nothing of what they stand for, and never stand for two things."""

from itertools import product

import pytest

from perilune_gateway.request.aliases import Aliases
from perilune_gateway.request.identity import inferred_id


def test_no_salt_of_one_tenant_is_one_of_another() -> None:
    aliases = Aliases(b"secret")
    tenants, own = ("", "a", "ab", "1:a"), ("", "b", "ab", "a", "\ud800", "s" * 1000)
    salts = {aliases.cache_salt(tenant, salt) for tenant, salt in product(tenants, own)}
    assert len(salts) == len(tenants) * len(own)
    assert aliases.cache_salt("a", aliases.cache_salt("b", "")) not in salts


@pytest.mark.parametrize("own", ["", "s", "@/\\\0" * 100])
def test_vllm_takes_every_salt(own: str) -> None:
    """It refuses more than 128 characters, and some."""
    salt = Aliases(b"").cache_salt("tenant", own)
    assert 0 < len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


def test_gateways_with_one_secret_agree_and_others_cannot_guess() -> None:
    one, same, other = Aliases(b"secret"), Aliases(b"secret"), Aliases(b"other")
    assert one.cache_salt("t", "s") == same.cache_salt("t", "s") != other.cache_salt("t", "s")
    assert one.endpoint("10.0.0.1:8000") == same.endpoint("10.0.0.1:8000") != other.endpoint("10.0.0.1:8000")


def test_a_secret_may_be_of_any_length() -> None:
    assert Aliases(b"s" * 1000).endpoint("x") != Aliases(b"s" * 1001).endpoint("x")


def test_the_id_of_a_response_tells_its_session_and_endpoint_to_its_tenant_alone() -> None:
    aliases, session = Aliases(b"secret"), inferred_id()
    told = aliases.response("t", session, "10.0.0.1:8000", 2**53 - 1)
    assert told.startswith("resp_"), "vLLM refuses others"
    assert aliases.stored("t", told) == (session, aliases.endpoint("10.0.0.1:8000"))
    assert aliases.stored("other", told) is None
    assert Aliases(b"other").stored("t", told) is None
    assert Aliases(b"secret").stored("t", told) is not None, "another gateway of the pool"


@pytest.mark.parametrize("at", [5, 40, 52, 66, -1])
def test_a_changed_id_tells_nothing(at: int) -> None:
    aliases = Aliases(b"secret")
    told = list(aliases.response("t", inferred_id(), "10.0.0.1:8000", 1))
    told[at] = "1" if told[at] == "0" else "0"
    assert aliases.stored("t", "".join(told)) is None


@pytest.mark.parametrize("given", ["", "resp_1", "resp_" + "0" * 74, "resp_" + "é" * 74, "x" * 10**6])
def test_ids_of_others_tell_nothing(given: str) -> None:
    assert Aliases(b"secret").stored("t", given) is None


def test_a_session_that_its_client_names_is_not_in_the_id() -> None:
    aliases = Aliases(b"secret")
    stored = aliases.stored("t", aliases.response("t", "mine", "10.0.0.1:8000", 1))
    assert stored is not None
    assert stored.endpoint == aliases.endpoint("10.0.0.1:8000")
    assert "mine" not in stored.session_id


def test_ids_of_the_secret_before_are_still_read() -> None:
    """So that responses can be continued while a secret changes."""
    before, now = Aliases(b"before"), Aliases(b"now", b"before")
    told = before.stored("t", given := before.response("t", "", "10.0.0.1:8000", 7))
    assert told is not None
    assert now.stored("t", given) == told
    assert now.stored("other", given) is None
    assert told.endpoint in now.endpoints("10.0.0.1:8000")
    assert now.endpoint("10.0.0.1:8000") in now.endpoints("10.0.0.1:8000")
    assert now.stored("t", now.response("t", "", "10.0.0.1:8000", 8)) is not None
    assert Aliases(b"now").stored("t", given) is None

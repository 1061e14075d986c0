"""Aliases tell nothing of what they stand for, and never stand for two things."""

from itertools import product

import pytest

from perilune_gateway.request.aliases import Aliases


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

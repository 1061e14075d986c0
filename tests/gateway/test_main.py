"""What a running gateway takes over from a changed pool document."""

import pytest

from perilune_api.pool import (
    EndpointSpec,
    Limits,
    Metadata,
    Model,
    Pool,
    Routing,
    SessionKeys,
    Spec,
    SpecError,
)
from perilune_gateway import main
from perilune_gateway.feeds.endpoints import PoolFile


def pool(endpoints: int = 0, routing: Routing | None = None, model: str = "m") -> Pool:
    listed = tuple(EndpointSpec(f"10.0.0.{i + 1}:8000") for i in range(endpoints))
    return Pool(Metadata("p"), Spec(Model(model), routing=routing or Routing(), endpoints=listed))


@pytest.fixture
async def gateway(tmp_path):
    first = pool()
    made = main.Gateway(first, PoolFile(tmp_path / "pool.yaml", first))
    yield made
    await made.tokenizer.close()
    await made.events.close()


async def test_what_sessions_and_decisions_may_take_follows_the_document(gateway) -> None:
    session = SessionKeys(idle_seconds=60, max_sessions=7)
    limits = Limits(decision_seconds=4, max_body_bytes=9)
    gateway.on_pool(pool(routing=Routing(session=session, limits=limits)))
    assert (gateway.sessions.idle_s, gateway.sessions.max_sessions) == (60, 7)
    assert gateway.tokenizer.timeout_s == 4 * main.TOKENS_SHARE
    assert gateway.service.limits.max_body_bytes == 9


async def test_the_index_has_room_for_the_endpoints_of_now(gateway, monkeypatch) -> None:
    widened = []
    monkeypatch.setattr(gateway.index, "widen", widened.append)
    gateway.on_pool(pool(endpoints=30))
    gateway.on_pool(pool(endpoints=1))
    assert widened == [30 * main.INDEX_BLOCKS_PER_ENDPOINT * (281_600 // 16), main.MIN_INDEX_BLOCKS]


async def test_another_model_needs_another_gateway(gateway) -> None:
    with pytest.raises(SpecError, match=r"restart the gateway - at `\$.spec.model`"):
        gateway.on_pool(pool(model="n"))

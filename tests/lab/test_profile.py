"""An engine's speed becomes the pool's cost model."""

from dataclasses import replace
from math import exp
from random import Random

import msgspec
import pytest

from perilune_api.pool import Engine
from perilune_gateway.model import H20_30B, EngineModel
from perilune_lab import profile, profile_transfer
from perilune_lab.load.client import TargetError
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.profile import Measured, Profile, as_yaml, lengths, measure
from perilune_lab.profile_fit import Decoded, cost_model, factors
from perilune_lab.profile_transfer import Moved, Peer, Transfer


def row(tokens: int, cached: int, times: float) -> Measured:
    """Of an engine that takes so many times an H20's seconds."""
    alone_s = H20_30B.request_overhead_s(tokens) + H20_30B.prefill_s(tokens - cached, cached)
    return Measured(tokens, cached, times * alone_s)


@pytest.mark.parametrize("times", [0.1, 1.0, 40.0])
def test_the_scale_is_how_many_times_an_h20s_seconds_an_engine_takes(times: float):
    found = Profile([row(512, 0, times), row(2048, 1024, times), row(8192, 0, times)])
    assert found.scale == pytest.approx(times)
    assert found.largest_error == pytest.approx(0.0, abs=1e-9)
    assert msgspec.yaml.decode(as_yaml(found), type=Engine).prefill_scale == pytest.approx(times, rel=0.01)


def test_what_one_number_does_not_explain_is_said():
    found = Profile([row(512, 0, 1.0), row(2048, 0, 1.0), row(8192, 0, 1.5)])
    assert found.scale == 1.0
    assert found.largest_error == pytest.approx(0.5)
    assert "prompts of up to 8192 tokens; largest error 50%" in as_yaml(found)


OTHER = EngineModel(
    flops_per_token=14e9,
    attention_flops=2e6,
    prefill_fixed_s=0.009,
    overhead_fixed_s=0.012,
    overhead_per_token_s=5e-6,
    decode_floor_s=0.011,
    memory_bytes_per_s=1.7e12,
)
"""No H20, and no multiple of one."""
GRID = [
    (n, c)
    for length in (1024, 4096, 16_384)
    for n, c in ((length // 2, 0), (length, length // 2), (length, length - 16))
]


def profiled(noise: float = 0.0) -> Profile:
    dice = Random(1)
    rows = (Measured(n, c, 0.0) for n, c in GRID)
    prompts = [replace(row, ttft_s=row.by(OTHER) * exp(dice.gauss(0.0, noise))) for row in rows]
    decoded = Decoded(0.011, OTHER.decode_step_s(8, 8 * 16_384), 8, 8 * 16_384)
    return Profile(prompts, decoded)


def test_the_whole_cost_model_of_an_engine_that_is_no_multiple_of_an_h20_is_found():
    said = msgspec.yaml.decode(as_yaml(profiled()), type=Engine)
    engine = H20_30B.told(said.cost_model)
    for tokens, cached in (*GRID, (50_000, 0), (50_000, 40_000)):
        assert Measured(tokens, cached, 0.0).by(engine) == pytest.approx(
            Measured(tokens, cached, 0.0).by(OTHER), rel=0.01
        )
    for streams, context in ((1, 1000), (8, 131_072), (64, 500_000)):
        assert engine.decode_step_s(streams, context) == pytest.approx(
            OTHER.decode_step_s(streams, context), rel=0.01
        )
    assert said.prefill_scale == 1.0


def test_a_cost_model_explains_noisy_times_better_than_one_number():
    noisy = profiled(0.03)
    single = Profile(noisy.prompts[:2] * 3)
    assert single.cost is None
    assert noisy.largest_error < 0.1
    assert max(abs(r.ttft_s / (noisy.scale * r.predicted_s) - 1) for r in noisy.prompts) > 0.3


def test_no_seconds_are_below_0():
    rows = [(1.0, n) for n in (1.0, 2.0, 3.0)]
    assert factors(rows, [3.0, 2.0, 1.0]) == pytest.approx([factors([(1.0,)] * 3, [3.0, 2.0, 1.0])[0], 0.0])


def test_a_step_that_is_no_longer_beside_others_tells_nothing_of_the_memory():
    assert cost_model(profiled().prompts, Decoded(0.01, 0.0105, 8, 10_000)).decode_scale is None


@pytest.mark.parametrize(
    ("longest", "all_of_them"), [(512, [512]), (16_384, [1024, 4096, 16_384]), (2047, [2047])]
)
def test_lengths_end_with_the_longest(longest: int, all_of_them: list[int]):
    assert lengths(longest) == all_of_them


@pytest.mark.processes
async def test_an_engine_is_measured_with_and_without_cached_part():
    options = EngineOptions(time_scale=20.0)
    async with Stack(engines=1, options=options, with_gateway=False, with_envoy=False) as stack:
        found = await measure(f"http://{stack.endpoints[0]}", max_tokens=4096, repeat=2, time_scale=20.0)
    assert [(r.tokens, r.cached) for r in found.prompts] == [
        (512, 0),
        (1024, 512),
        (1024, 1008),
        (2048, 0),
        (4096, 2048),
        (4096, 4080),
    ]
    assert all(r.ttft_s > 0 for r in found.prompts)
    assert found.decoded
    assert found.cost


@pytest.mark.processes
async def test_transfers_from_a_peer_are_measured():
    """Simulated engines whose KV takes real seconds. How exactly they are measured depends on the machine."""
    options = EngineOptions(time_scale=20.0, handoff=True)
    async with Stack(engines=2, options=options, with_gateway=False, with_envoy=False) as stack:
        target, giver = stack.pool.spec.endpoints
        peer = Peer(f"http://{giver.address}", giver.bootstrap)
        found = await profile_transfer.measure(
            f"http://{target.address}", peer, target_model(stack), [2048, 8192, 32_768], 2, 20.0
        )
        with pytest.raises(TargetError, match="names no engine"):
            await profile_transfer.measure(
                f"http://{target.address}", Peer(peer.url, giver.address), target_model(stack), [512], 1, 1.0
            )
    assert [row.tokens for row in found.rows] == [2048, 8192, 32_768]
    assert "nicGbits" in as_yaml(Profile([row(512, 0, 1.0)]), found, 98_304)


def target_model(stack: Stack) -> str:
    return stack.pool.spec.model.name


def test_speed_and_fixed_seconds_of_transfers():
    of = Transfer([Moved(tokens, 0.002 + tokens / 50_000) for tokens in (1000, 4000, 16_000)])
    assert of.fit() == pytest.approx((0.002, 50_000))
    assert of.nic_gbits(97_000) == pytest.approx(200 * 50_000 * 97_000 / 9.7e9)
    assert Transfer([Moved(1000, 0.02)]).fit() == pytest.approx((0.0, 50_000))


async def test_nobody_there():
    with pytest.raises(TargetError):
        await measure("http://127.0.0.1:9")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--target", "x"],
        ["--target", "http://x", "--max-tokens", "100"],
        ["--target", "http://x", "--bootstrap", "10.0.0.2:8998"],
    ],
)
def test_a_wrong_call(arguments: list[str]):
    with pytest.raises(SystemExit) as ended:
        profile.main(arguments)
    assert ended.value.code == 2

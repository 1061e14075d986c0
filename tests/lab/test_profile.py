"""An engine's speed becomes the pool's cost model."""

import asyncio
from dataclasses import replace
from math import exp
from random import Random

import msgspec
import pytest

from perilune_api.pool import Engine, NodePlace, Topology
from perilune_api.topology import Place
from perilune_gateway.model import H20_30B, EngineModel
from perilune_lab import profile, profile_transfer
from perilune_lab.load.client import TargetError
from perilune_lab.load.result import Result
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.profile import lengths, measure, with_decode
from perilune_lab.profile_fit import Decoded, Measured, Profile, factors
from perilune_lab.profile_transfer import Moved, Peer, Transfer
from perilune_lab.profile_yaml import as_yaml, decimal, left_out


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


def test_decode_is_predicted_with_the_pools_own_bytes_of_kv_per_token():
    small = replace(profiled(), kv_bytes_per_token=8192)
    engine = replace(H20_30B.told(small.cost), kv_bytes_per_token=8192)
    assert engine.decode_step_s(8, 8 * 16_384) == pytest.approx(small.decoded.beside_s, rel=0.01)
    assert engine == small.engine


def test_a_cost_model_explains_noisy_times_better_than_one_number():
    noisy = profiled(0.03)
    single = Profile(noisy.prompts[:2] * 3)
    assert single.cost is None
    assert noisy.largest_error < 0.1
    assert max(abs(r.ttft_s / (noisy.scale * r.predicted_s) - 1) for r in noisy.prompts) > 0.3


def test_no_seconds_are_below_0():
    rows = [(1.0, n) for n in (1.0, 2.0, 3.0)]
    assert factors(rows, [3.0, 2.0, 1.0]) == pytest.approx([factors([(1.0,)] * 3, [3.0, 2.0, 1.0])[0], 0.0])


def sentences(text: str) -> str:
    """Return the comments, without line ends."""
    return " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))


def test_a_step_that_is_no_longer_beside_others_tells_nothing_of_the_memory_and_the_yaml_says_so():
    found = replace(profiled(), decoded=Decoded(0.01, 0.0105, 8, 10_000))
    text = as_yaml(found)
    cost = msgspec.yaml.decode(text, type=Engine).cost_model
    assert (cost.decode_seconds, cost.decode_scale) == (0.01, None)
    (said,) = left_out(found)
    assert said in sentences(text)
    assert said.startswith("decodeScale is left out")
    assert "a token of 8 streams takes 10.5 ms, hardly more than the 10 ms" in said
    most = float(said.partition("at most ")[2].partition(" ")[0])
    as_said = H20_30B.told(msgspec.structs.replace(cost, decode_scale=most))
    assert as_said.decode_step_s(8, 10_000) == pytest.approx(0.0105, rel=0.01)
    assert "--max-tokens or more --streams" in said


def answer(tpot_s: float | None = 0.01, error: str = "") -> Result:
    return Result(
        session="s",
        turn=0,
        request_id="r",
        submitted_at_s=0.0,
        finished_at_s=1.0,
        due_at_s=0.0,
        prompt_tokens=1000,
        tpot_s=tpot_s,
        error=error,
    )


@pytest.mark.parametrize(
    ("alone", "beside", "why"),
    [
        (answer(), [answer(), answer(error="400: too long")], "1 of 2 answers side by side failed (400: too"),
        (answer(0.0), [answer()], "an answer came in one piece"),
        (answer(), [answer(None)], "an answer came in one piece"),
    ],
)
def test_decode_that_was_not_measured_is_left_out_and_the_yaml_says_why(alone, beside, why):
    found = with_decode(profiled().prompts, alone, beside)
    text = as_yaml(found)
    cost = msgspec.yaml.decode(text, type=Engine).cost_model
    assert (cost.decode_seconds, cost.decode_scale) == (None, None)
    (said,) = left_out(found)
    assert said in sentences(text)
    assert said.startswith("decodeSeconds and decodeScale are left out")
    assert why in said


def test_what_was_measured_as_asked_has_nothing_left_out():
    found = with_decode(profiled().prompts, answer(0.01), [answer(0.02), answer(0.03), answer(0.04)], 2.0)
    assert found.decoded == Decoded(0.02, 0.06, 3, 3 * 1032)
    moved = Transfer([Moved(1000, 0.02), Moved(4000, 0.05)])
    assert left_out(found, moved) == []
    assert "left out" not in as_yaml(found, moved)


def test_too_few_lengths_leave_the_cost_model_out():
    few = Profile([row(512, 0, 2.0)])
    (said,) = left_out(few)
    assert "costModel is left out" in said
    assert said in sentences(as_yaml(few))
    wanted = int(said.partition("--max-tokens ")[2].partition(" ")[0])
    assert len(lengths(wanted)) == 2


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
    # a busy machine may read all of a fast engine's answer at once
    assert found.decoded or "in one piece" in found.undecoded
    assert found.cost


@pytest.mark.processes
async def test_transfers_from_a_peer_are_measured():
    """Simulated engines whose KV takes real seconds, over a link slow enough that a busy machine's delays are
    small beside them. How exactly they are measured depends on the machine."""
    options = EngineOptions(time_scale=20.0, handoff=True, arguments=("--send-bytes-per-s", "1e9"))
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
    assert "nicGbits" in as_yaml(Profile([row(512, 0, 1.0)]), found)


def target_model(stack: Stack) -> str:
    return stack.pool.spec.model.name


@pytest.mark.processes
async def test_a_peer_that_hands_nothing_over_costs_no_other_measurement(tmp_path, capsys):
    file = tmp_path / "cost.yaml"
    async with Stack(
        engines=2, options=EngineOptions(time_scale=20.0), with_gateway=False, with_envoy=False
    ) as s:
        target, peer = (f"http://{address}" for address in s.endpoints)
        arguments = ["--target", target, "--peer", peer, "--bootstrap", s.endpoints[1], "--yaml", str(file)]
        arguments += ["--max-tokens", "2048", "--repeat", "1", "--time-scale", "20"]
        assert await asyncio.to_thread(profile.main, arguments) == profile.DOWN
    said = f"the speed of transfers are left out: http://{s.endpoints[1]}/query names no engine"
    assert said in sentences(file.read_text())
    assert said in capsys.readouterr().err
    assert msgspec.yaml.decode(file.read_text(), type=Engine).cost_model.request_seconds is not None


def test_speed_and_fixed_seconds_of_transfers():
    of = Transfer([Moved(tokens, 0.002 + tokens / 50_000) for tokens in (1000, 4000, 16_000)])
    assert of.fit() == pytest.approx((0.002, 50_000))
    assert of.nic_gbits(97_000) == pytest.approx(200 * 50_000 * 97_000 / 9.7e9)
    assert Transfer([Moved(1000, 0.02)]).fit() == pytest.approx((0.0, 50_000))
    assert Transfer([Moved(1000, 0.01), Moved(4000, 0.05)]).fit() == pytest.approx((0.0, 91_111), rel=1e-4)


MOVED = Transfer([Moved(n, 0.004 + n / 30_000) for n in (1000, 4000, 16_000)], "10.0.0.1", "engine.example")


@pytest.mark.parametrize("rack", ["r", ""])
def test_the_nodes_lines_predict_the_transfers_that_were_measured(rack: str):
    """Under spec.topology.nodes of a pool document; with nodes of one rack and of none."""
    text = as_yaml(profiled(), MOVED)
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   NODE-OF-")]
    nodes = msgspec.yaml.decode("\n".join(lines), type=dict[str, NodePlace])
    assert list(nodes) == ["NODE-OF-10.0.0.1", "NODE-OF-engine.example"]
    if not rack:
        elsewhere = float(sentences(text).partition("spine, say ")[2].partition(" ")[0])
        nodes = {name: NodePlace(nic_gbits=elsewhere) for name in nodes}
    link = Topology(nodes).link(*(Place(name, rack) for name in nodes))
    engine = H20_30B.told(msgspec.yaml.decode(text, type=Engine).cost_model)
    for moved in MOVED.rows:
        predicted_s = engine.transfer_s(moved.tokens, link.bandwidth_bytes_per_s)
        assert predicted_s == pytest.approx(moved.seconds, rel=0.01)


def test_the_nodes_command_names_the_node_by_the_engines_address():
    text = as_yaml(replace(profiled(), kv_bytes_per_token=1_500_000), MOVED)
    labels = [line.removeprefix("#   ") for line in text.splitlines() if "kubectl label" in line]
    assert labels == [
        "kubectl label node --overwrite $(kubectl get pod -A --field-selector=status.podIP=10.0.0.1"
        " -o jsonpath='{.items[0].spec.nodeName}') perilune.dev/nic-gbits=928",
        "kubectl label node --overwrite NODE-OF-engine.example perilune.dev/nic-gbits=928",
    ]


def test_transfers_that_are_no_line_are_said_to_be_none():
    of = Transfer([Moved(1000, 0.01), Moved(2000, 0.02), Moved(4000, 0.08)])
    fixed_s, tokens_per_s = of.fit()
    apart = [abs(moved.seconds / (fixed_s + moved.tokens / tokens_per_s) - 1) for moved in of.rows]
    assert f"Gbit/s; largest error {max(apart):.0%}." in sentences(as_yaml(profiled(), of))
    assert max(apart) > 0.3


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (34.8, "34.8"), (200.0, "200"), (5.9e-9, "0.0000000059"), (1.2e20, "120000000000000000000")],
)
def test_numbers_have_no_exponent(value: float, said: str):
    assert decimal(value) == said


def test_a_label_has_no_exponent():
    assert "nic-gbits=9280" in as_yaml(replace(profiled(), kv_bytes_per_token=15_000_000), MOVED)


def test_transfers_of_one_length_tell_no_fixed_seconds():
    one = Transfer([Moved(4000, 0.05)])
    text = as_yaml(profiled(), one)
    assert msgspec.yaml.decode(text, type=Engine).cost_model.transfer_seconds is None
    (said,) = left_out(profiled(), one)
    assert "transferSeconds is left out" in said
    assert said in sentences(text)
    assert "nicGbits" in text


def test_transfers_that_take_no_longer_with_more_tokens_tell_no_speed():
    of = Transfer([Moved(1000, 0.05), Moved(4000, 0.04)])
    text = as_yaml(profiled(), of)
    assert msgspec.yaml.decode(text, type=Engine).cost_model.transfer_seconds == pytest.approx(0.0439)
    (said,) = left_out(profiled(), of)
    assert "speed of transfers is left out" in said
    assert said in sentences(text)
    assert "nicGbits" not in text


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

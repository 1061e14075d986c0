"""`perilune profile` on two genuine engines, the second of which hands KV over: what it writes is the
`spec.engine` and the topology of a pool, and predicts what is then measured of prompts of other lengths."""

import asyncio
import os
import re
import sys
from dataclasses import replace
from math import exp, log
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec import structs

from enginebed import models
from perilune_api.pool import NodePlace, Topology, dump, parse
from perilune_gateway.model import H20_30B
from perilune_lab import profile, profile_transfer
from perilune_operator.render import engine_door

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]
KV_BYTES = 8192
"""Bytes of KV that this model keeps of each token, in float32."""
LONGEST, OTHER = 4096, 3000
"""Tokens of the longest prompt that the command measures, and of the longest that is then predicted."""
MOST, MOST_MOVED = 3.0, 4.0
"""How many times as far from the prediction as the YAML says another measurement may be, and one of
transfers: on a machine with other work two of them differ, most where processes wait for each other."""
SPEC = {
    # bfloat16 ends in SIGILL on CPUs with AMX, at the first forward after a fetched prefill
    "engine": {"args": ["--num-gpu-blocks-override=1500", "--dtype=float32"]},
    "mooncake": {"transfer": "handoff"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = models.write(models.QWEN_DEEP, tmp_path_factory.mktemp("deep"))
    return {"name": "tiny", "source": str(folder), "contextTokens": 8192, "kvBytesPerToken": KV_BYTES}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(rig, model):
    rendered = rig.render({"model": model, **SPEC})
    started = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(*started)
    return started


async def perilune_profile(rig, engines, file):
    """Return the exit status and what was said."""
    target, peer = (engine.url for engine in engines)
    command = ["profile", "--target", target, "--peer", peer, "--max-tokens", str(LONGEST)]
    command += ["--repeat", "5", "--kv-bytes-per-token", str(KV_BYTES), "--yaml", str(file)]
    ran = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("perilune"),
        *command,
        env={**os.environ, engine_door.SECRET: rig.secret},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await ran.communicate()
    return ran.returncode, said.decode()


def with_nodes(document, engines, text):
    """Return the pool document, parsed again, whose nodes say what the comments of the YAML do."""
    for engine, endpoint in zip(engines, document.spec.endpoints, strict=True):
        text = text.replace(f"NODE-OF-{engine.pod.address}", endpoint.node)
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   node-")]
    said = msgspec.yaml.decode("\n".join(lines), type=dict[str, NodePlace])
    nodes = {
        name: structs.replace(place, nic_gbits=said[name].nic_gbits)
        for name, place in document.spec.topology.nodes.items()
    }
    spec = structs.replace(document.spec, topology=Topology(nodes))
    return parse(dump(structs.replace(document, spec=spec)))


def close(times, most):
    """Compare seconds. `times`: what was measured, its seconds, those predicted; `most`: how many times one
    may be the other."""
    apart = []
    for what, measured_s, predicted_s in times:
        print(f"{what}: {measured_s * 1e3:.1f} ms, predicted {predicted_s * 1e3:.1f} ms")
        apart.append(exp(abs(log(measured_s / predicted_s))))
    assert max(apart) < most, apart


async def test_what_is_written_is_a_pools_and_predicts_its_engines(rig, engines, model, tmp_path):
    status, said = await perilune_profile(rig, engines, tmp_path / "cost.yaml")
    print(f"\n{said}")
    assert status == 0
    text = (tmp_path / "cost.yaml").read_text()
    print(text)
    told = msgspec.yaml.decode(text)
    sentences = text.replace("\n# ", " ")
    prompts, transfers = (1 + int(n) / 100 for n in re.findall(r"largest error (\d+)%", sentences))
    assert {"prefillTokenSeconds", "decodeSeconds", "transferSeconds"} <= told["costModel"].keys()

    rendered = rig.render({"model": model, **SPEC, "engine": {**SPEC["engine"], **told}})
    document = rendered.with_endpoints([engine.pod.address for engine in engines])
    spec = with_nodes(document, engines, text).spec
    believed = replace(H20_30B.told(spec.engine.cost_model), kv_bytes_per_token=spec.model.kv_bytes_per_token)
    taker, giver = (spec.topology.place(endpoint.node) for endpoint in spec.endpoints)
    link_bytes_per_s = spec.topology.link(taker, giver).bandwidth_bytes_per_s

    target, peer = engines
    found = await profile.measure(target.url, model="tiny", max_tokens=OTHER, repeat=5)
    close(
        [
            (f"{row.tokens} tokens, {row.cached} cached", row.ttft_s, row.by(believed))
            for row in found.prompts
        ],
        MOST * prompts,
    )
    assert found.decoded
    close([("a token", found.decoded.alone_s, believed.decode_step_s(1, profile.SHORTEST))], MOST)
    moved = await profile_transfer.measure(
        target.url,
        profile_transfer.Peer(peer.url, f"{peer.pod.address}:8998", rig.secret),
        "tiny",
        [OTHER // 2, OTHER],
        5,
        1.0,
    )
    close(
        [
            (
                f"{row.tokens} tokens handed over",
                row.seconds,
                believed.transfer_s(row.tokens, link_bytes_per_s),
            )
            for row in moved.rows
        ],
        MOST_MOVED * transfers,
    )

"""/api/health names the right cause for every setting in which pool and engines differ."""

import asyncio
import json
import shutil

import pytest
import pytest_asyncio
from msgspec import structs

from enginebed import conversations, judged
from enginebed.completions import until
from enginebed.pages import table, write
from perilune_api.pool import HashAlgorithm

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
FEW_MESSAGES = 5
OTHER_WORDS = "<|im_start|>", "<|im_start|>the "
"""What another template has in place of the engine's words."""
MIXED_HEAD = (
    *("API", "tools", "thinking", "engines equal", "different", "in"),
    *("proof", "tokenized by"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(rig, tiny, tmp_path_factory):
    """One as the operator renders it, but for a small replay buffer; one whose root is random, with another
    chat template. A gateway is told about one of them only, unless a test says otherwise."""
    model = {
        "name": "tiny",
        "source": str(tiny["qwen"]),
        "contextTokens": 4096,
        "tokenizer": str(tiny["qwen"]),
    }
    rendered = rig.render({"model": model, "engine": {"args": ["--num-gpu-blocks-override=200"]}})
    usual = await rig.engine(rendered.with_buffer(FEW_MESSAGES), 0)
    other = tmp_path_factory.mktemp("template") / "other.jinja"
    other.write_text(json.loads((tiny["qwen"] / "tokenizer_config.json").read_text())["chat_template"])
    other.write_text(other.read_text().replace(*OTHER_WORDS))
    differs = rendered.with_option("--chat-template", str(other))
    random = await rig.engine(differs, 1, PYTHONHASHSEED="3141592653")  # the pool has another seed
    await rig.ready(usual, random)
    document = rendered.with_endpoints([usual.pod.address, random.pod.address])
    await rig.start_gateway(document)
    await rig.start_envoy(document)
    return document


async def after_traffic(rig, document, at, seed, **changes):
    """Return the problems that a gateway names after some conversations at the engine of that number. The
    gateway was started with these changes of `spec.engine` and `spec.model`."""
    spec = document.spec
    made = structs.replace(
        spec,
        engine=structs.replace(spec.engine, **changes.get("engine", {})),
        model=structs.replace(spec.model, **changes.get("model", {})),
        endpoints=(spec.endpoints[at],),
    )
    rig.kill_gateway()
    await asyncio.shield(rig.gateway.ended)
    await rig.start_gateway(structs.replace(document, spec=made))
    return await after_more(rig, seed)


async def after_more(rig, seed):
    """Return the problems that the running gateway names after some conversations."""
    talks = [one for one in conversations.mixed(24, seed, "tiny") if one.api is conversations.Api.CHAT]
    phase = judged.Phase(f"health {seed}")
    await judged.play(rig, talks, phase, 24)
    assert not phase.failed, judged.misses(phase)
    return (await rig.page("/api/health"))["problems"]


def hashing(document, **changes):
    return {"engine": {"hashing": structs.replace(document.spec.engine.hashing, **changes)}}


def parity(problems):
    """Return the cause of the one problem of hashes; a gateway that has just started may still be learning,
    too."""
    (problem,) = [one for one in problems if one["kind"] == "parity"]
    return problem["cause"]


async def test_nothing_is_wrong_with_what_the_operator_renders(rig, engines):
    """What the small buffer lost before the gateway listened is learnt from later requests."""
    problems = await after_traffic(rig, engines, 0, 1)
    for seed in (11, 12, 13):
        if {problem["kind"] for problem in problems} != {"learning"}:
            break
        problems = await after_more(rig, seed)
    assert problems == []


async def test_another_block_size(rig, engines):
    problems = await after_traffic(rig, engines, 0, 2, engine={"block_size": 64})
    assert "block_size" in {problem["kind"] for problem in problems}
    assert any("--block-size" in problem["cause"] for problem in problems), problems
    assert any("blockSize: 32" in problem["cure"] for problem in problems), problems


async def test_another_hash_algorithm(rig, engines):
    changed = hashing(engines, algorithm=HashAlgorithm.SHA256_CBOR)
    cause = parity(await after_traffic(rig, engines, 0, 3, **changed))
    assert "hash algorithm 'sha256'" in cause


async def test_another_seed(rig, engines):
    cause = parity(await after_traffic(rig, engines, 0, 4, **hashing(engines, seed="7")))
    assert "PYTHONHASHSEED 'unset'" in cause


async def test_another_chat_template(rig, engines, tiny, tmp_path):
    """The engine's tokens of a short conversation show it as soon as a chat was seen; from then on the engine
    tokenizes."""
    folder = shutil.copytree(tiny["qwen"], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace(*OTHER_WORDS)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    await after_traffic(rig, engines, 0, 5, model={"tokenizer": str(folder)})

    async def named():
        return "tokens" in {problem["kind"] for problem in (await rig.page("/api/health"))["problems"]}

    await until(named, 30)
    health = await rig.page("/api/health")
    (row,) = [row for row in health["renderings"] if (row["api"], row["tools"]) == ("chat", False)]
    assert (row["part"], row["asks_engine"]) == ("template", True)
    print(json.dumps(health["renderings"], indent=1))
    talks = [one for one in conversations.mixed(24, 51, "tiny") if one.api is conversations.Api.CHAT]
    phase = judged.Phase("another template")
    await judged.play(rig, talks, phase, 24)
    asked = [one for one in phase.answered if one.source == "engine"]
    assert asked, judged.misses(phase)
    assert all(one.prompt == one.prompt_predicted for one in asked), judged.misses(phase)


async def test_two_engines_of_one_pool_with_different_templates(rig, engines):
    """Health's table says which engine differs, in what, and who tokenizes: the gateway, since not most of
    them do."""
    rig.kill_gateway()
    await asyncio.shield(rig.gateway.ended)
    await rig.start_gateway(engines)
    await after_more(rig, 61)
    first, second = (endpoint.address for endpoint in engines.spec.endpoints)

    async def told():
        rows = (await rig.page("/api/health"))["renderings"]
        return {(row["api"], row["equal"], *row["different"]) for row in rows} >= {
            ("chat", 1, second),
            ("completions", 2),
        }

    await until(told, 60)
    health = await rig.page("/api/health")
    names = {first: "the first", second: "the second"}
    rows = [
        (
            *(row["api"], "yes" if row["tools"] else "no", row["thinking"], str(row["equal"])),
            ", ".join(names[engine] for engine in row["different"]),
            f"{row['part']}, from token {row['at']} on" if row["part"] else "",
            *(row["proof"], "an engine" if row["asks_engine"] else "the gateway"),
        )
        for row in health["renderings"]
    ]
    write("mixed", table(MIXED_HEAD, rows))
    assert {problem["endpoint"] for problem in health["problems"] if problem["kind"] == "tokens"} == {second}


async def test_a_random_root(rig, engines):
    assert "random" in parity(await after_traffic(rig, engines, 1, 6))


async def test_a_replay_buffer_that_has_rolled_over(rig, engines):
    """The gateway starts after the buffer has lost the conversations' first blocks. It says so for as long as
    it does not know them, and learns them again from later requests."""
    one_endpoint = structs.replace(engines.spec, endpoints=engines.spec.endpoints[:1])

    async def restarted():
        rig.kill_gateway()
        await asyncio.shield(rig.gateway.ended)
        await rig.start_gateway(structs.replace(engines, spec=one_endpoint))

    talks = [one for one in conversations.mixed(24, 7, "tiny") if one.api is conversations.Api.CHAT]
    await restarted()  # so that one engine has all of them, and more messages than its buffer has room for
    await judged.play(rig, talks, judged.Phase("before"), 40)
    await restarted()

    async def says_what_it_lacks():
        return any(
            problem["kind"] == "learning" and "unknown parents" in f"{problem['message']} {problem['cause']}"
            for problem in (await rig.page("/api/health"))["problems"]
        )

    await until(says_what_it_lacks, 30)
    for n in range(12):
        await judged.play(rig, talks, judged.Phase(f"late {n}"), 2)
        problems = (await rig.page("/api/health"))["problems"]
        assert not any("tokenized differently" in problem["cause"] for problem in problems), problems

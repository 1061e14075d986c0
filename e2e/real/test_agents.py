"""Today's coding agents and SDKs, each in its own words, with templates like Qwen3's and Llama's: the gateway
knows of every turn how much of it is cached."""

import asyncio
import json
import shutil
import time
from collections import defaultdict
from random import Random

import aiohttp
import pytest
import pytest_asyncio
from msgspec import structs

from enginebed import agents, judged, models
from enginebed.completions import until
from enginebed.marks import REQUESTS, SHORT
from enginebed.pages import table, write
from perilune_api.names import DECISION_HEADER
from perilune_api.pool import parse

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
EXACT = 0.995
BLOCK, BLOCKS = 32, 6000
"""So many blocks that nothing is evicted."""
TURNS = 4 if SHORT else 5 if REQUESTS < 200 else 12
"""The fourth is the first after all that an agent puts between turns."""
TEMPLATES = {
    "Qwen3-like": (models.QWEN_THINKING, ["--reasoning-parser=qwen3"]),
    "Llama-like": (models.LLAMA, []),
}
DIFFERENT = {
    "Qwen3-like": {"You may call": "You can call", r"<think>\n\n</think>": r"<think>\n</think>"},
    "Llama-like": {"indent=4": "indent=2"},
}
"""What the gateway's copy of a template has in place of the engine's words."""
HEAD = (
    *("agent", "API", "template", "thinking", "turns"),
    *("exact by headers", "exact by body", "bodies not read", "slowest"),
)
TEMPLATES_HEAD = (
    *("engine's template", "API", "tools", "thinking", "engines equal", "differs in", "equal tokens"),
    *("proof", "tokenized by"),
)
STORED_HEAD = ("template", "conversation", "length here", "predicted", "length", "cached")
_rows: list[tuple[str, ...]] = []
_stored: list[tuple[str, ...]] = []
_renderings: list[tuple[str, ...]] = []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(rig, tmp_path_factory):
    """Start an engine with each template, all at once, and Envoy in front of them. Return what the operator
    rendered and the engine's address, by template."""
    started = {}
    for number, (template, (model, arguments)) in enumerate(TEMPLATES.items()):
        folder = models.write(model, tmp_path_factory.mktemp("models") / model.name)
        rendered = rig.render(
            {
                "model": {
                    "name": "tiny",
                    "source": str(folder),
                    "contextTokens": 16384,
                    "tokenizer": str(folder),
                },
                "engine": {
                    "args": [
                        f"--num-gpu-blocks-override={BLOCKS}",
                        "--enable-auto-tool-choice",
                        "--tool-call-parser=hermes",
                        *arguments,
                    ],
                    "env": [{"name": "VLLM_ENABLE_RESPONSES_API_STORE", "value": "1"}],
                },
            }
        )
        started[template] = rendered, await rig.engine(rendered, number)
    await rig.ready(*(engine for _, engine in started.values()))
    at = {template: (rendered, engine.pod.address) for template, (rendered, engine) in started.items()}
    await rig.start_envoy(rendered.with_endpoints([address for _, address in at.values()]))
    return at


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[*TEMPLATES])
async def served(request, rig, engines):
    """Put a gateway of one engine alone behind Envoy, in place of the other engine's."""
    rendered, address = engines[request.param]
    if rig.gateway is not None:
        rig.kill_gateway()
        await asyncio.shield(rig.gateway.ended)
    await rig.start_gateway(rendered.with_endpoints([address]))
    return request.param, rig


async def turn(rig, agent):
    """Play an agent's next turn; return what the gateway predicted of it and what the engine counted."""
    asked, began, kind = agent.ask(), time.monotonic(), agent.kind

    def failed(why):
        agent.unanswered()
        return judged.Judged(kind.name, why, at=time.monotonic(), seconds=time.monotonic() - began)

    headers = {**asked.headers, DECISION_HEADER: "yes"}
    try:
        async with rig.http.post(rig.url + asked.path, data=asked.body, headers=headers) as answer:
            body, decision = await answer.read(), answer.headers.get(DECISION_HEADER, "")
            if answer.status != 200:
                return failed(f"{answer.status} {body[:300]!r}")
    except (aiohttp.ClientError, TimeoutError) as error:
        return failed(repr(error))
    at = time.monotonic()
    said = agents.read(kind.api, body, asked.streams)
    page = await rig.page(f"/api/decisions/{decision.rpartition('request=')[2]}")
    if agent.named:
        assert page["session_id"] == (
            f"{agent.parent}/{agent.session}"
            if agent.parent and kind.name == "Claude Code"
            else agent.session
        )
    agent.answered(said)
    return judged.Judged(
        f"{agent.kind.name} {agent.kind.api} thinking {agent.thinks}",
        "",
        decision,
        page["target"],
        page["token_source"],
        page["phase"],
        said.usage.prompt,
        page["prompt_tokens"],
        said.usage.cached,
        page["cached_tokens"],
        True,
        at,
        at - began,
    )


def exact(of):
    """Return "exact of all" predictions."""
    return f"{sum(each.above == 0 for each in of)} of {len(of)}" if of else "–"


async def test_every_turn_of_an_agent_is_predicted_exactly(served, report):
    template, rig = served
    phase = report.phase(f"agents, {template}")
    sessions = [*agents.sessions("tiny", 1)]
    turns = defaultdict(list)
    order = sessions * TURNS
    Random(template).shuffle(order)
    for agent in order:
        if agent.kind.name == "Claude Code" and agent.steps and len(agent.steps) % 2:
            await counts(rig, agent)
        one = await turn(rig, agent)
        phase.requests.append(one)
        turns[agent.kind, agent.thinks].append((agent.named, one))
    for (kind, thinks), played in turns.items():
        by_headers = [one for named, one in played if named and not one.failed]
        by_body = [one for named, one in played if not named and not one.failed]
        unread = sum(one.phase == "headers" for _, one in played)
        slowest = max(one.seconds for _, one in played)
        _rows.append(
            (
                *(kind.name, str(kind.api), template, str(thinks), str(len(played))),
                *(exact(by_headers), exact(by_body), str(unread), f"{slowest:.1f} s"),
            )
        )
    if template == [*TEMPLATES][-1]:
        write("agents", table(HEAD, _rows))
    assert not phase.failed, judged.misses(phase)
    assert not phase.far_above(BLOCK), judged.misses(phase)
    assert phase.exact >= EXACT, judged.misses(phase)
    assert all(one.prompt == one.prompt_predicted for one in phase.answered if one.source == "local"), (
        judged.misses(phase)
    )


async def counts(rig, agent):
    """Let Claude Code ask how many tokens its prompt has. Nothing is cached by that."""
    asked = agents.count_tokens(agent)
    async with rig.http.post(rig.url + asked.path, data=asked.body, headers=asked.headers) as answer:
        assert answer.status == 200, await answer.text()
        assert (await answer.json())["input_tokens"] > 0


async def test_gateway_and_engine_render_alike(served):
    """Health says so of every kind that the agents have sent."""
    _, rig = served

    async def seen():
        rows = (await rig.page("/api/health"))["renderings"]
        return {row["api"] for row in rows} >= {"chat", "responses", "messages"}

    await until(seen, 60)
    rows = (await rig.page("/api/health"))["renderings"]
    assert [row for row in rows if row["different"]] == []
    assert [row for row in rows if not row["equal"]] == []


async def test_codex_goes_on_by_http_where_web_sockets_are_refused(served):
    _, rig = served
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await rig.http.ws_connect(rig.url.replace("http", "ws", 1) + "/v1/responses")
    assert refused.value.status == 426 or 400 <= refused.value.status < 500
    codex = next(iter(agents.sessions("tiny", 7)))
    assert not (await turn(rig, codex)).failed


STORED = {
    "by body, thinking": {},
    "by body, not thinking": {"reasoning": {"effort": "none"}},
    "by headers, thinking": {},
    "with tools": {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
}
"""Stored conversations, and what their requests have. With thinking, answers of the template like Qwen3's
are thoughts alone, which vLLM leaves out of the next prompt."""


@pytest.mark.parametrize("kind", STORED)
async def test_a_stored_response_goes_on_where_it_is(served, kind):
    """The SDK sends `previous_response_id` and only what is new. The gateway has the turns that came through
    it, and asks the engine for the answers."""
    template, rig = served
    before, told = "", []
    for n in range(5):
        said = agents.text(Random(f"{kind} {n}"), 60)
        body = {"model": "tiny", "input": said, "instructions": f"{kind}.", "max_output_tokens": 8 + n}
        body |= STORED[kind] | ({"previous_response_id": before} if before else {})
        headers = {DECISION_HEADER: "yes"} | ({"x-session-id": kind} if "headers" in kind else {})
        async with rig.http.post(f"{rig.url}/v1/responses", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            response, decision = await answer.json(), answer.headers[DECISION_HEADER]
        before, usage = response["id"], response["usage"]
        page = await rig.page(f"/api/decisions/{decision.rpartition('request=')[2]}")
        predicted = page["token_source"], page["prompt_tokens"], page["cached_tokens"]
        told.append((predicted, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]))
    lists = (", ".join(str(of[1:][what]) for of, *_ in told) for what in (0, 1))
    counted = (", ".join(str(one[what]) for one in told) for what in (1, 2))
    _stored.append((template, kind, *lists, *counted))
    if (template, kind) == ([*TEMPLATES][-1], [*STORED][-1]):
        write("stored", table(STORED_HEAD, _stored))
    assert told == [(("local", tokens, cached), tokens, cached) for _, tokens, cached in told]
    assert all(cached for *_, cached in told[1:])


async def test_health_shows_in_what_templates_differ(served, tmp_path):
    """A gateway with another copy of the template says so, and lets the engine tokenize such prompts."""
    template, rig = served
    document = parse((rig.folder / "pool.yaml").read_bytes())
    model = document.spec.model
    folder = shutil.copytree(model.tokenizer, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for words, others in DIFFERENT[template].items():
        assert words in config["chat_template"]
        config["chat_template"] = config["chat_template"].replace(words, others)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rig.kill_gateway()
    await asyncio.shield(rig.gateway.ended)
    spec = structs.replace(document.spec, model=structs.replace(model, tokenizer=str(folder)))
    await rig.start_gateway(structs.replace(document, spec=spec))
    sessions = [*agents.sessions("tiny", 2)]
    for agent in sessions:
        assert not (await turn(rig, agent)).failed

    async def told():
        rows = (await rig.page("/api/health"))["renderings"]
        return {row["api"] for row in rows if row["asks_engine"]} == {"chat", "responses", "messages"}

    await until(told, 60)
    rows = (await rig.page("/api/health"))["renderings"]
    for row in rows:
        part = f"{row['part']}: {row['ours']} here, {row['theirs']} there" if row["part"] else ""
        _renderings.append(
            (
                *(template, row["api"], "yes" if row["tools"] else "no", row["thinking"]),
                *(str(row["equal"]), part, str(row["at"]) if part else "all", row["proof"]),
                "an engine" if row["asks_engine"] else "the gateway",
            )
        )
    write("templates", table(TEMPLATES_HEAD, _renderings))
    assert all(row["asks_engine"] for row in rows if row["different"]), rows
    assert any(row["part"] == "tools" for row in rows), rows
    asked = [one for agent in sessions if (one := await turn(rig, agent)).source == "engine"]
    assert asked
    others = [(o.kind, o.prompt, o.prompt_predicted) for o in asked if o.prompt != o.prompt_predicted]
    assert others == []

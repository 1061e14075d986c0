"""Whether gateway and engine make the same tokens: what is asked, and what a difference is called."""

import json
from pathlib import Path

import pytest
from rendering_engine import RenderingEngine, folder_with
from token_requests import CHAT, CHATML, COMPLETIONS, HI, MESSAGES, RESPONSES, request

from perilune_api.pool import Model
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.conversation import Form
from perilune_gateway.request.tokens.proof import (
    EVERY_KIND,
    Kind,
    Outcome,
    Part,
    Proof,
    Thinking,
    Told,
    Verdict,
    ask,
    form_of,
    judge,
    kind_of,
    kinds,
    preferred,
    probe,
    table,
)

QWEN = """\
{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""


async def verdicts(engine, folder, wanted=EVERY_KIND, generate=False):
    """Return what is found of an engine by a gateway with the tokenizer in `folder`."""
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)))
    questions = ask(engine.post, wanted, "m", tokenizer.engine_form, generate=generate)
    told = {kind: word async for kind, word in questions}
    ours = {kind: tokenizer.local_ids(probe(kind, "m").request) for kind in wanted}
    await tokenizer.close()
    return judge(told, ours)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return folder_with(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        pytest.param(COMPLETIONS, {"prompt": "hi"}, Kind(Api.COMPLETIONS), id="text"),
        pytest.param(CHAT, {"messages": HI}, Kind(Api.CHAT), id="chat"),
        pytest.param(
            CHAT,
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]},
            Kind(Api.CHAT, tools=True),
            id="tools",
        ),
        pytest.param(
            CHAT,
            {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
            Kind(Api.CHAT, thinking=Thinking.OFF),
            id="no thinking",
        ),
        pytest.param(
            RESPONSES,
            {"input": "hi", "reasoning": {"effort": "low"}},
            Kind(Api.RESPONSES, thinking=Thinking.ON),
            id="an effort",
        ),
        pytest.param(
            MESSAGES,
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
                ]
            },
            Kind(Api.MESSAGES, thinking=Thinking.ON),
            id="thoughts of an earlier turn",
        ),
        pytest.param(
            MESSAGES,
            {"messages": HI, "thinking": {"type": "disabled"}},
            Kind(Api.MESSAGES, thinking=Thinking.OFF),
            id="disabled",
        ),
    ],
)
def test_the_kind_of_a_request(path, body, kind):
    assert kind_of(request(path, **body)) == kind


def test_each_kind_is_asked_after_the_plainer_ones_that_it_is_compared_with():
    seen = Kind(Api.MESSAGES, tools=True, thinking=Thinking.OFF)
    assert kinds([seen]) == [
        Kind(Api.COMPLETIONS),
        Kind(Api.MESSAGES),
        Kind(Api.MESSAGES, thinking=Thinking.OFF),
        seen,
    ]
    assert [kind_of(probe(kind, "m").request) for kind in EVERY_KIND] == EVERY_KIND


async def test_equal_templates_make_equal_tokens_of_every_kind(qwen):
    engine = RenderingEngine(qwen)
    found = await verdicts(engine, qwen)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.EQUAL}
    assert {kind.api: verdict.proof for kind, verdict in found.items()} == {
        Api.COMPLETIONS: Proof.TOKENIZED,
        Api.CHAT: Proof.TOKENIZED,
        Api.MESSAGES: Proof.COUNTED,
        Api.RESPONSES: Proof.CONVERTED,
    }
    assert not any(path in ("/v1/responses", "/v1/messages") for path in engine.asked), "nothing is generated"
    assert engine.asked.count("/v1/chat/completions/render") == 1, "not asked again if it is not there"


async def test_an_engine_that_renders_proves_it_all(qwen):
    found = await verdicts(RenderingEngine(qwen, renders=True), qwen)
    assert {v.proof for kind, v in found.items() if kind.api is not Api.COMPLETIONS} == {Proof.RENDERED}
    assert {verdict.outcome for verdict in found.values()} == {Outcome.EQUAL}


async def test_a_generated_token_counts_a_responses_prompt(qwen):
    engine = RenderingEngine(qwen)
    found = await verdicts(engine, qwen, [Kind(Api.RESPONSES)], generate=True)
    assert found[Kind(Api.RESPONSES)].proof is Proof.COUNTED
    assert engine.asked.count("/v1/responses") == 1


PLAIN, TOOLS = Kind(Api.CHAT), Kind(Api.CHAT, tools=True)
OFF = Kind(Api.CHAT, thinking=Thinking.OFF)


@pytest.mark.parametrize(
    ("theirs", "parts"),
    [
        pytest.param(
            QWEN.replace("<tools>", "<functions>"), {PLAIN: None, TOOLS: Part.TOOLS, OFF: None}, id="tools"
        ),
        pytest.param(
            QWEN.replace("<think></think>", ""), {PLAIN: None, TOOLS: None, OFF: Part.THINKING}, id="thinking"
        ),
        pytest.param(
            QWEN.replace("<|im_end|>\\n", "<|im_end|>"),
            {PLAIN: Part.TEMPLATE, TOOLS: Part.TEMPLATE, OFF: Part.TEMPLATE},
            id="template",
        ),
        pytest.param(
            "{{- '<|endoftext|>' }}" + QWEN,
            {PLAIN: Part.SPECIAL_TOKENS, TOOLS: Part.SPECIAL_TOKENS, OFF: Part.SPECIAL_TOKENS},
            id="special token",
        ),
    ],
)
async def test_a_difference_is_named_by_its_part(theirs, parts, qwen, tmp_path):
    found = await verdicts(RenderingEngine(folder_with(tmp_path, theirs)), qwen)
    assert {kind: found[kind].part for kind in parts} == parts
    for kind, part in parts.items():
        if part is not None:
            assert found[kind].outcome is Outcome.DIFFERENT
            assert found[kind].cured, "its /tokenize is right"
            assert found[kind].ours != found[kind].theirs


async def test_another_tokenizer_is_named_for_every_kind(qwen, tmp_path):
    found = await verdicts(RenderingEngine(folder_with(tmp_path, QWEN, words="another text entirely")), qwen)
    assert {verdict.part for verdict in found.values()} == {Part.TOKENIZER}


async def test_an_engine_that_makes_other_messages_is_found_by_its_count(qwen):
    engine = RenderingEngine(qwen)
    engine.more_counted = 3
    found = await verdicts(engine, qwen)
    verdict = found[Kind(Api.MESSAGES)]
    assert (verdict.outcome, verdict.part, verdict.cured) == (Outcome.DIFFERENT, Part.CONVERSION, False)
    assert found[Kind(Api.CHAT)].outcome is Outcome.EQUAL


async def test_an_engine_without_tokenize_tells_nothing(qwen):
    async def refuses(path: str, body: bytes, most: int) -> bytes | None:
        return None if path != "/tokenize" else b'{"tokens": "none"}'

    engine = RenderingEngine(qwen)
    engine.answer = refuses
    found = await verdicts(engine, qwen)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNTOLD}


LATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        pytest.param(CHATML, Form(unthinking="low"), id="takes anything, and never thinks"),
        pytest.param(QWEN, Form(), id="thinks or not"),
        pytest.param(
            LATE + "{{ m.content }}{%- endfor %}",
            Form(system_first=True, unthinking="low"),
            id="system first",
        ),
    ],
)
async def test_what_a_template_expects_is_found_by_asking(template, form, tmp_path):
    assert await form_of(RenderingEngine(folder_with(tmp_path, template)).post, "m") == form


EQUAL = Verdict(outcome=Outcome.EQUAL, proof=Proof.TOKENIZED)
OTHER = Verdict(
    outcome=Outcome.DIFFERENT, proof=Proof.TOKENIZED, part=Part.TOOLS, at=7, ours=1, theirs=2, cured=True
)
UNTOLD = Verdict(outcome=Outcome.UNTOLD)


def test_an_engine_is_asked_where_most_engines_differ():
    most = preferred({"a": {TOOLS: OTHER}, "b": {TOOLS: OTHER}, "c": {TOOLS: EQUAL}})
    assert most == {TOOLS: {"a", "b"}}
    assert preferred({"a": {TOOLS: OTHER}, "b": {TOOLS: EQUAL}}) == {}
    assert preferred({"a": {TOOLS: OTHER}, "b": {TOOLS: UNTOLD}}) == {TOOLS: {"a"}}
    assert preferred({}) == {}


def test_the_table_has_a_row_for_each_kind():
    plain, tools = table(
        {"a": {PLAIN: EQUAL, TOOLS: OTHER}, "b": {PLAIN: EQUAL, TOOLS: OTHER}, "c": {TOOLS: UNTOLD}}
    )
    assert (plain.equal, plain.different, plain.part, plain.asks_engine) == (2, (), None, False)
    assert (tools.equal, tools.different, tools.untold) == (0, ("a", "b"), 1)
    assert (tools.part, tools.at, tools.ours, tools.theirs) == (Part.TOOLS, 7, 1, 2)
    assert tools.asks_engine


def test_a_prompt_that_nobody_could_render_is_untold():
    assert judge({PLAIN: Told()}, {}) == {PLAIN: UNTOLD}
    assert json.loads(json.dumps(probe(PLAIN, "m").body))["model"] == "m"


@pytest.mark.parametrize(
    ("theirs", "outcome"),
    [
        pytest.param((1,) * 40, Outcome.EQUAL, id="equal"),
        pytest.param((2,) * 60, Outcome.DIFFERENT, id="others"),
        pytest.param((), Outcome.UNTOLD, id="none"),
        pytest.param((1,) * 4, Outcome.UNTOLD, id="hardly any"),
        pytest.param((1,) * 400, Outcome.UNTOLD, id="far too many"),
    ],
)
def test_what_cannot_be_the_prompt_is_no_answer(theirs, outcome):
    found = judge({PLAIN: Told(tokenized=theirs)}, {PLAIN: (1,) * 40})
    assert found[PLAIN].outcome is outcome


def test_one_answer_to_all_questions_is_none():
    told = {Kind(Api.COMPLETIONS): Told(tokenized=(1, 2)), PLAIN: Told(tokenized=(1, 2))}
    found = judge(told, {Kind(Api.COMPLETIONS): (1, 2), PLAIN: (1, 2, 3)})
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNTOLD}

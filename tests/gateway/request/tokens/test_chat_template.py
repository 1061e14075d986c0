"""Templates as models bring them, in a sandbox they cannot leave."""

import json
from datetime import datetime

import pytest

from perilune_gateway.request.tokens.chat_template import ChatTemplate, TemplateError, load
from perilune_gateway.request.tokens.conversation import Conversation

HI = {"role": "user", "content": "hi"}
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' and not (loop.first and tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.index0 > ns.last %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def render(source, *messages, tools=None, documents=None, kwargs=(), special=(), **options) -> str:
    template = ChatTemplate(source, dict(special), lambda: datetime(2026, 3, 1))
    return template.render(
        Conversation(messages=list(messages), tools=tools, documents=documents, template_kwargs=dict(kwargs)),
        **options,
    )


def test_a_chatml_template_is_rendered():
    assert render(CHATML, {"role": "system", "content": "é"}, HI) == (
        "<|im_start|>system\né<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_tools_thinking_and_tool_answers():
    call = {"function": {"name": "f", "arguments": {"b": "<é>", "a": 1}}}
    tools = [{"type": "function", "function": {"name": "f", "description": None}}]
    assert render(
        WITH_TOOLS,
        {"role": "system", "content": "be brief"},
        HI,
        {"role": "assistant", "content": "", "reasoning_content": "\nhm\n", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        tools=tools,
        kwargs={"enable_thinking": False},
    ) == (
        "<|im_start|>system\nbe brief\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "f", "description": null}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '\n<tool_call>\n{"name": "f", "arguments": {"b": "<é>", "a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb", id="blocks take their line with them"),
        pytest.param("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}', id="tojson is plain"),
        pytest.param("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}', id="tojson indents"),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "01 Mar 2026", id="strftime_now"),
        pytest.param(
            "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "1",
            id="break",
        ),
        pytest.param("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c", id="generation is its content"),
        pytest.param("[{{ bos_token }}|{{ eos_token }}]", "[<s>|]", id="special tokens, unknown ones empty"),
        pytest.param("{{ deep }}", "yes", id="template kwargs"),
        pytest.param("{{ messages[0].content }}", "hi", id="kwargs do not hide messages"),
        pytest.param("{{ documents is none }}{{ tools is none }}", "TrueTrue", id="absent is none"),
    ],
)
def test_templates_find_the_functions_that_they_use(source, text):
    assert render(source, HI, kwargs={"deep": "yes", "messages": []}, special={"bos_token": "<s>"}) == text


@pytest.mark.parametrize(
    ("last", "text"),
    [
        pytest.param("Once", "<|im_start|>assistant\nOnce", id="open end"),
        pytest.param("Once ", "<|im_start|>assistant\nOnce ", id="its space stays"),
    ],
)
def test_the_last_message_is_continued(last, text):
    rendered = render(
        CHATML,
        HI,
        {"role": "assistant", "content": last},
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n" + text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        pytest.param("{{ raise_exception('Roles must alternate') }}", "Roles must alternate", id="refuses"),
        pytest.param("{{ messages[0].content.nothing.more }}", "UndefinedError", id="undefined"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="divides by zero"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError", id="never ends"),
        pytest.param("{{ ().__class__.__bases__[0].__subclasses__() }}", "SecurityError", id="classes"),
        pytest.param("{{ raise_exception.__globals__['os'] }}", "SecurityError|Undefined", id="globals"),
        pytest.param("{{ messages.append(1) }}", "SecurityError", id="changes its arguments"),
        pytest.param("{{ range(10000000) | list }}", "OverflowError", id="huge range"),
        pytest.param("{% include '/etc/hostname' %}", "TypeError", id="reads files"),
    ],
)
def test_what_fails_is_a_template_error(source, why):
    with pytest.raises(TemplateError, match=why):
        render(source, HI)


def test_values_and_helpers_have_no_inside():
    assert render("{{ raise_exception.__globals__ }}|{{ strftime_now.__code__ }}") == "|"
    assert "class" not in render("{{ '{0.__class__}'.format(1) }}")


def test_a_template_that_does_not_compile():
    with pytest.raises(TemplateError, match="TemplateSyntaxError"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        pytest.param(CHATML, False, id="text"),
        pytest.param(WITH_TOOLS, False, id="loops, but not over content"),
        pytest.param(
            "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
            True,
            id="parts",
        ),
        pytest.param(
            "{% set rest = messages[1:] %}{% for m in rest | list %}"
            "{% for p in m.content | selectattr('type') %}{% endfor %}{% endfor %}",
            True,
            id="parts of a part of messages",
        ),
        pytest.param(
            "{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}",
            False,
            id="content of others",
        ),
    ],
)
def test_which_templates_loop_over_parts(source, parts):
    assert ChatTemplate(source).form.keeps_parts is parts


def folder_with(path, config=None, **files):
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        pytest.param({"chat_template": "config"}, {}, "config", id="tokenizer_config.json"),
        pytest.param({"chat_template": "config"}, {"chat_template__jinja": "file"}, "file", id="file wins"),
        pytest.param(None, {"chat_template__jinja": "file"}, "file", id="file alone"),
        pytest.param(
            {}, {"chat_template__json": '{"chat_template": "json"}'}, "json", id="chat_template.json"
        ),
        pytest.param(
            {
                "chat_template": "{{ bos_token }}{{ eos_token }}",
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
            },
            {},
            "<s></s>",
            id="special tokens, written both ways",
        ),
    ],
)
def test_where_a_folder_keeps_its_template(config, files, text, tmp_path):
    templates = load(folder_with(tmp_path, config, **files))
    assert templates.choose(tools=False).render(Conversation(messages=[HI])) == text
    assert templates.choose(tools=True).render(Conversation(messages=[HI])) == text


def test_the_template_for_tools_is_used_with_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    templates = load(folder_with(tmp_path, {"chat_template": named}))
    assert templates.choose(tools=False).render(Conversation(messages=[HI])) == "plain"
    assert templates.choose(tools=True).render(Conversation(messages=[HI])) == "tools"


def test_a_folder_without_template(tmp_path):
    assert load(folder_with(tmp_path, {"chat_template": None})) is None
    assert load(tmp_path / "nowhere") is None


LATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        pytest.param("{% for m in messages %}{{ m.role }}{% endfor %}", {}, id="takes anything"),
        pytest.param(LATE + "{% endfor %}", {"system_first": True}, id="the system first"),
        pytest.param(
            "{{ strftime_now('%Y') }}", {"system_first": True}, id="a function that vLLM lacks here"
        ),
        pytest.param("{{ 'developer' }}", {"knows_developer": True}, id="developers"),
        pytest.param(
            "{{ '<think></think>' if enable_thinking is false }}", {"unthinking": "none"}, id="thinks or not"
        ),
        pytest.param("{{ reasoning_effort or 'high' }}", {"unthinking": "none"}, id="has words for none"),
        pytest.param(
            "{{ reasoning_effort if reasoning_effort in ('low', 'high') else 'max' }}",
            {"unthinking": "low"},
            id="always thinks",
        ),
        pytest.param(
            "{{ raise_exception('no') if reasoning_effort == 'none' }}",
            {"unthinking": "low"},
            id="refuses not to think",
        ),
    ],
)
def test_what_a_template_expects_of_conversations(source, form):
    told = ChatTemplate(source).form
    assert {name: getattr(told, name) for name in form} == form


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "rewrites"),
    [
        pytest.param(CHATML, False, id="as it was said"),
        pytest.param(CHATML.replace("{{ m.content }}", PARTS), False, id="as it was said, in parts"),
        pytest.param(CHATML.replace("\n{{", f"\n{THOUGHTS}{{{{"), True, id="thoughts of the last turn"),
        pytest.param(
            CHATML.replace("\n{{", "\n<think>{{ m.reasoning or '' }}</think>{{"), True, id="all thoughts"
        ),
        pytest.param(
            CHATML + "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}",
            True,
            id="empty thoughts, if asked for none",
        ),
        pytest.param(
            CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}", True, id="thinks at once"
        ),
        pytest.param(
            CHATML.replace("m.content", "m.content.split('</think>')[-1] | trim"),
            True,
            id="removes thoughts from texts",
        ),
        pytest.param("{{ raise_exception('no') }}", False, id="refuses everything"),
    ],
)
def test_which_templates_rewrite_answers(source, rewrites):
    assert ChatTemplate(source).form.rewrites_answers is rewrites


def test_of_two_templates_the_stricter_one_decides_where_system_messages_are(tmp_path):
    entries = [
        {"name": "default", "template": "{{ messages[0].role }}"},
        {"name": "tool_use", "template": LATE + "{% endfor %}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    templates = load(tmp_path)
    assert templates.default.form.system_first
    assert templates.with_tools.form.system_first


THINKS = "{% for m in messages %}{{ m.role }}:{{ m.reasoning or '' }}|{{ m.content | trim }};{% endfor %}"


@pytest.mark.parametrize(
    ("last", "text"),
    [
        pytest.param({"content": "hm", "reasoning": "hm"}, "user:|hi;assistant:hm|hm", id="said twice"),
        pytest.param({"content": "", "reasoning": "hm"}, "user:|hi;assistant:hm|", id="nothing said yet"),
        pytest.param(
            {"content": " well  "}, "user:|hi;assistant:|well", id="spaces that the template removes"
        ),
    ],
)
def test_an_answer_goes_on_where_its_text_ends_and_nowhere_else(last, text):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(THINKS, HI, {"role": "assistant", **last}, **options) == text


def test_of_parts_the_last_text_goes_on():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image"}]
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}."
    message = {"role": "assistant", "content": parts}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, message, **options) == "[a][b"
    assert parts[1]["text"] == "b"


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([], id="no message"),
        pytest.param([{"role": "assistant", "content": [{"type": "image"}]}], id="no text"),
    ],
)
def test_what_cannot_go_on_is_a_template_error(messages):
    with pytest.raises(TemplateError):
        render(CHATML, *messages, add_generation_prompt=False, continue_final_message=True)

"""Requests whose prompts are to become tokens, and a chat template."""

import json

from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI = [{"role": "user", "content": "hi"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
HALF_EMOJI = {"name": "f", "arguments": '{"a": "\\ud83d"}'}
CHATML = """\
{%- for message in messages %}
    {%- if message.role == 'pirate' %}{{- raise_exception('no pirates') }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | length }}{%- endif %}
{%- for call in messages[-1].tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def request(path, **body) -> ParsedRequest:
    parsed = parse(path, json.dumps({"model": "m"} | body).encode())
    assert isinstance(parsed, ParsedRequest), parsed
    return parsed

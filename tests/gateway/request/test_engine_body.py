"""What is written into bodies for engines."""

import json

import pytest

from perilune_gateway.model import NO_FIELDS, EngineFields
from perilune_gateway.request.engine_body import for_engine
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"model": "m", "prompt": "}{"}', id="braces in a text"),
        pytest.param(b'{"model":"m","prompt":"x","priority":-5}\n ', id="the client's own is overruled"),
        pytest.param(b'{"model":"m","prompt":"x","metadata":{"a":{}}}', id="ends in an object"),
    ],
)
def test_a_priority_is_all_that_changes(body: bytes):
    changed = for_engine(body, EngineFields(priority=41))
    assert changed is not None
    assert json.loads(changed) == json.loads(body) | {"priority": 41}
    parsed = parse("/v1/completions", changed)
    assert isinstance(parsed, ParsedRequest)
    assert parsed.priority == 41


@pytest.mark.parametrize(
    ("body", "xargs"),
    [
        pytest.param(b'{"model":"m","prompt":"}"}', {}, id="none"),
        pytest.param(b'{"model":"m","vllm_xargs":null} ', {}, id="null"),
        pytest.param(
            b'{"vllm_xargs":{"session_id":"s","n":1},"model":"m"}', {"session_id": "s", "n": 1}, id="own"
        ),
    ],
)
def test_asking_for_a_full_report_keeps_the_clients_own_arguments(body: bytes, xargs: dict):
    changed = for_engine(body, EngineFields(0, "tenant", "resp_1", full_report=True))
    assert changed is not None
    assert json.loads(changed) == json.loads(body) | {
        "vllm_xargs": {"kv_cache_report_mode": "full"} | xargs,
        "cache_salt": "tenant",
        "request_id": "resp_1",
        "priority": 0,
    }


def test_a_body_to_which_nothing_is_added_stays():
    assert for_engine(b'{"model":"m"}', NO_FIELDS) is None


@pytest.mark.parametrize("more", [b"", b',"x":"\xff"', b',"x":' + b"[" * 5_000 + b"]" * 5_000])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_fields_are_added_to_whatever_was_parsed(mark: bytes, more: bytes):
    body = mark + b'{"model":"m","prompt":"x"%b}' % more
    changed = for_engine(body, EngineFields(priority=3, full_report=True))
    assert changed is not None
    assert changed.startswith(body[:-1] + b',"priority":3')

"""How a conversation begins, by which sessions without a name are told apart."""

import msgspec
import pytest

from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.parsed import ParsedRequest, opening

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def begins(path: str, **body: object) -> bytes:
    request = KnownBodies().parse(path, msgspec.json.encode({"model": "m", **body}))
    assert isinstance(request, ParsedRequest)
    return opening(request)


def messages(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]


def test_later_turns_begin_as_the_first_one() -> None:
    first = begins(CHAT, messages=messages("system", "user"))
    assert first == begins(CHAT, messages=messages("system", "user", "assistant", "user"))
    assert first != begins(CHAT, messages=messages("user", "assistant", "user"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "once"}),
        (TEXT, {"prompt": [1, 2, 3]}),
        ("/v1/responses", {"input": "once"}),
        ("/v1/messages", {"messages": messages("user"), "max_tokens": 1}),
    ],
)
def test_prompts_of_any_kind_begin_somehow(path: str, body: dict[str, object]) -> None:
    assert begins(path, **body)

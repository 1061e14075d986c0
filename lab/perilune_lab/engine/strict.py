"""What vLLM refuses with status 400 apart from wrong types: one row per rule.

`first_broken` goes through the rules of the request's API; their words are those of vLLM 0.32. The last
group, off by default, has what OpenAI's own API refuses and vLLM lets pass: conversations whose tool calls
and tool messages do not belong together.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_SALT_CHARACTERS = 128
_FORBIDDEN_IN_SALT = frozenset("@/\\\0")


class Rule(NamedTuple):
    param: str
    """The field that the error names."""
    broken: Callable[[Any], object]
    """Takes the body's fields."""
    message: str
    """Names fields in braces."""


def _outside(name: str, low: float, high: float) -> Callable[[Any], bool]:
    def broken(body: Any) -> bool:
        value = getattr(body, name)
        return value is not None and not low <= value <= high

    return broken


def _unknown_tool(body: Any) -> bool:
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return False
    return choice["function"]["name"] not in [tool["function"]["name"] for tool in body.tools]


EVERYWHERE = (
    Rule("n", lambda body: body.n is not None and body.n < 1, "n must be at least 1, got {n}."),
    Rule(
        "presence_penalty",
        _outside("presence_penalty", -2.0, 2.0),
        "presence_penalty must be in [-2, 2], got {presence_penalty}.",
    ),
    Rule(
        "frequency_penalty",
        _outside("frequency_penalty", -2.0, 2.0),
        "frequency_penalty must be in [-2, 2], got {frequency_penalty}.",
    ),
    Rule(
        "temperature", _outside("temperature", 0.0, 2.0), "temperature must be in [0, 2], got {temperature}."
    ),
    Rule(
        "top_p",
        lambda body: body.top_p is not None and not 0.0 < body.top_p <= 1.0,
        "top_p must be in (0, 1], got {top_p}.",
    ),
    Rule("min_p", _outside("min_p", 0.0, 1.0), "min_p must be in [0, 1], got {min_p}."),
    Rule(
        "top_k",
        lambda body: body.top_k is not None and body.top_k < -1,
        "top_k must be 0 (disable), or at least 1, got {top_k}.",
    ),
    Rule(
        "cache_salt",
        lambda body: body.cache_salt == "",
        "Parameter 'cache_salt' must be a non-empty string if provided.",
    ),
    Rule(
        "cache_salt",
        lambda body: (
            len(body.cache_salt or "") > _SALT_CHARACTERS
            or not _FORBIDDEN_IN_SALT.isdisjoint(body.cache_salt or "")
        ),
        "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\', or NUL.",
    ),
)
STREAMS = (
    Rule(
        "stream_options",
        lambda body: body.stream_options and not body.stream,
        "Stream options can only be defined when `stream=True`.",
    ),
)
CHAT = (
    Rule(
        "tools",
        lambda body: body.tools == [],
        "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
    ),
    Rule(
        "tool_choice",
        lambda body: body.tool_choice not in (None, "none") and body.tools is None,
        "When using `tool_choice`, `tools` must be set.",
    ),
    Rule(
        "tool_choice",
        lambda body: (
            body.tool_choice not in (None, "none", "auto", "required")
            and not isinstance(body.tool_choice, dict)
        ),
        'Invalid value for `tool_choice`: {tool_choice}! Only named tools, "none", "auto" or "required" are'
        " supported.",
    ),
    Rule(
        "tool_choice",
        _unknown_tool,
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
    ),
    Rule(
        "top_logprobs",
        lambda body: body.top_logprobs and not body.logprobs,
        "when using `top_logprobs`, `logprobs` must be set to true.",
    ),
    Rule(
        "",
        lambda body: body.continue_final_message and body.add_generation_prompt,
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
    ),
)


def _unanswered(body: Any) -> bool:
    """Return whether a tool call is not answered by the tool messages right after it."""
    waiting: set[str] = set()
    for message in body.messages or ():
        if message["role"] == "tool":
            waiting.discard(message.get("tool_call_id"))
            continue
        if waiting:
            return True
        waiting = {call["id"] for call in message.get("tool_calls") or ()}
    return bool(waiting)


def _unasked(body: Any) -> bool:
    """Return whether a tool message answers no call of the assistant message before it."""
    asked: set[str] = set()
    for message in body.messages or ():
        if message["role"] != "tool":
            asked = {call["id"] for call in message.get("tool_calls") or ()}
        elif message.get("tool_call_id") not in asked:
            return True
    return False


OPENAI_CHAT = (
    Rule(
        "messages",
        _unasked,
        "Messages with role `tool` must have the `tool_call_id` of a call in the assistant message before.",
    ),
    Rule(
        "messages",
        _unanswered,
        "An assistant message with `tool_calls` must be followed by tool messages that respond to each"
        " `tool_call_id`.",
    ),
)


def first_broken(body: Any, rules: Sequence[Rule]) -> Rule | None:
    """Return the first rule that the body breaks. Raises TypeError, KeyError or AttributeError for values of
    another form than the API's."""
    return next((rule for rule in rules if rule.broken(body)), None)

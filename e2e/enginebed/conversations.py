"""Conversations of several turns over four APIs, as clients hold them. `mixed` makes them.

    Conversation ─ body ─▶ Envoy ─▶ engine ─ answer ─▶ Conversation, one turn longer

Every conversation has one history, which the table `WIRES` writes and reads in its API's words: a turn asks
something, or brings a tool's result. The answer that the engine gave becomes part of the next prompt.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

Object = dict[str, Any]

UNICODE = (
    "naïve café", "e\u0301tude", "東京の天気", "Ελλάδα", "שלום", "🙂👩‍👩‍👧", "½ ﬁn", "\u200bzero", "한국어",
)  # fmt: skip
"""Among them: composed and decomposed accents, a ligature, right to left, joined emoji, an invisible one."""
LONGEST_TOKENS = 2500
TOOL: Object = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Where?"}, "days": {"type": "integer"}},
    "required": ["place"],
}
TOOL_NAME, TOOL_HELP = "weather", "The weather of the next days – in °C"


class Api(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Said:
    """One entry of a history. A call has arguments, a result has the call's `id` too."""

    role: str
    text: str
    call: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine counted, in tokens."""

    prompt: int
    cached: int


@dataclass(slots=True)
class Conversation:
    api: Api
    model: str
    """The pool's model, or one of its adapters."""
    session: str
    """Empty if no header says whose turn it is."""
    salt: str
    tools: bool
    unicode: bool
    rng: Random
    system: str
    history: list[Said] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """For tables: the API and what is special."""
        special = {
            "tools": self.tools,
            "unicode": self.unicode,
            "adapter": "-" in self.model,
            "salt": bool(self.salt),
        }
        return " ".join([str(self.api), *(name for name, has in special.items() if has)])

    def ask(self) -> tuple[str, Object, dict[str, str]]:
        """Path, body and headers of the next request: a question, or the result of a tool that the last
        answer is taken to have called."""
        last = self.history[-1] if self.history else None
        if last is not None and last.call:
            self.history.append(Said("tool", text(self.rng, 12, self.unicode), last.call))
        else:
            self.history.append(Said("user", text(self.rng, self.rng.randrange(8, 60), self.unicode)))
        wire = WIRES[self.api]
        body = {"model": self.model, **wire.write(self), wire.limit: self.rng.randrange(2, 48)}
        if self.salt:
            body["cache_salt"] = self.salt
        headers = {"x-session-id": self.session} if self.session else {}
        return wire.path, body, headers

    def answered(self, answer: Object) -> Usage:
        """Add the answer to the conversation. A conversation that has become long is over, and another one
        begins."""
        wire = WIRES[self.api]
        said = wire.read(answer)
        if self.tools and self.rng.random() < 0.4:
            call = f"call_{len(self.history)}"
            arguments = {"place": text(self.rng, 2, self.unicode), "days": 3}
            self.history.append(Said("assistant", said, call, arguments))
        else:
            self.history.append(Said("assistant", said))
        usage = wire.usage(answer["usage"])
        if usage.prompt > LONGEST_TOKENS:
            self.history, self.session = [], self.session and f"{self.session}+"
        return usage

    def unanswered(self) -> None:
        """Note that the request failed; the client asks again, in other words."""
        self.history.pop()


def text(rng: Random, words: int, unicode: bool = False) -> str:
    made = ["".join(rng.choice("bcdfglmnprst") + rng.choice("aeiou") for _ in range(2)) for _ in range(words)]
    for at in range(0, words, 7) if unicode else ():
        made[at] = rng.choice(UNICODE)
    return " ".join(made)


def mixed(count: int, seed: int, model: str, adapters: Iterable[str] = ()) -> list[Conversation]:
    """Conversations of all APIs; some have tools, adapters, salts, Unicode, a header with the session's name,
    and they share a few system prompts."""
    systems = [text(Random(f"{seed} system {n}"), 60 + 40 * n, n == 1) for n in range(3)]
    models = [model, model, *adapters]
    made = []
    for n in range(count):
        rng = Random(f"{seed} {n}")
        api = tuple(Api)[n % 4]
        made.append(
            Conversation(
                api,
                rng.choice(models),
                f"s-{seed}-{n}" if n % 3 else "",
                # Anthropic's API has no salt
                f"tenant-{n % 2}" if n % 5 == 1 and api is not Api.MESSAGES else "",
                n // 4 % 2 == 1 and api is not Api.COMPLETIONS,
                n % 2 == 1,
                rng,
                rng.choice(systems),
            )
        )
    return made


@dataclass(frozen=True, slots=True)
class Wire:
    """An API."""

    path: str
    limit: str
    """Its name for the most tokens of an answer."""
    write: Callable[[Conversation], Object]
    read: Callable[[Object], str]
    usage: Callable[[Object], Usage]


def _function() -> Object:
    return {"name": TOOL_NAME, "description": TOOL_HELP, "parameters": TOOL}


def _chat(of: Conversation) -> Object:
    messages: list[Object] = [{"role": "system", "content": of.system}]
    for said in of.history:
        message: Object = {"role": said.role, "content": said.text}
        if said.role == "tool":
            message["tool_call_id"] = said.call
        elif said.call:
            function = {"name": TOOL_NAME, "arguments": json.dumps(said.arguments)}
            message["tool_calls"] = [{"id": said.call, "type": "function", "function": function}]
        messages.append(message)
    tools = {"tools": [{"type": "function", "function": _function()}], "tool_choice": "none"}
    return {"messages": messages, **(tools if of.tools else {})}


def _completions(of: Conversation) -> Object:
    asked = (f"\n{said.text}\n" if said.role != "assistant" else said.text for said in of.history)
    return {"prompt": "".join([of.system, *asked])}


def _responses(of: Conversation) -> Object:
    items: list[Object] = []
    for n, said in enumerate(of.history):
        if said.role == "tool":
            items.append({"type": "function_call_output", "call_id": said.call, "output": said.text})
        elif said.role == "user":
            items.append({"role": "user", "content": said.text})
        else:
            part = {"type": "output_text", "text": said.text, "annotations": []}
            message = {"type": "message", "role": "assistant", "id": f"msg_{n}", "status": "completed"}
            items.append({**message, "content": [part]})
            if said.call:
                call = {"type": "function_call", "call_id": said.call, "name": TOOL_NAME}
                items.append({**call, "arguments": json.dumps(said.arguments)})
    tools = {"tools": [{"type": "function", **_function()}], "tool_choice": "none"}
    return {"input": items, "instructions": of.system, "store": False, **(tools if of.tools else {})}


def _messages(of: Conversation) -> Object:
    messages: list[Object] = []
    for said in of.history:
        if said.role == "tool":
            content: Any = [{"type": "tool_result", "tool_use_id": said.call, "content": said.text}]
            messages.append({"role": "user", "content": content})
            continue
        content = said.text
        if said.call:
            use = {"type": "tool_use", "id": said.call, "name": TOOL_NAME, "input": dict(said.arguments)}
            content = [{"type": "text", "text": said.text}, use]
        messages.append({"role": said.role, "content": content})
    tool = {"name": TOOL_NAME, "description": TOOL_HELP, "input_schema": TOOL}
    tools = {"tools": [tool], "tool_choice": {"type": "none"}}
    return {"system": of.system, "messages": messages, **(tools if of.tools else {})}


def _openai_usage(usage: Object) -> Usage:
    return Usage(usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _responses_usage(usage: Object) -> Usage:
    return Usage(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


def _messages_usage(usage: Object) -> Usage:
    cached, new = (usage.get(f"cache_{what}_input_tokens") or 0 for what in ("read", "creation"))
    return Usage(usage["input_tokens"] + cached + new, cached)  # each token is in one of the three


def _parts(parts: Iterable[Object]) -> str:
    return "".join(part.get("text") or "" for part in parts)


WIRES: Mapping[Api, Wire] = {
    Api.CHAT: Wire(
        "/v1/chat/completions",
        "max_tokens",
        _chat,
        lambda answer: answer["choices"][0]["message"]["content"] or "",
        _openai_usage,
    ),
    Api.COMPLETIONS: Wire(
        "/v1/completions",
        "max_tokens",
        _completions,
        lambda answer: str(answer["choices"][0]["text"]),
        _openai_usage,
    ),
    Api.RESPONSES: Wire(
        "/v1/responses",
        "max_output_tokens",
        _responses,
        lambda answer: "".join(_parts(item.get("content") or ()) for item in answer["output"]),
        _responses_usage,
    ),
    Api.MESSAGES: Wire(
        "/v1/messages",
        "max_tokens",
        _messages,
        lambda answer: _parts(answer["content"]),
        _messages_usage,
    ),
}

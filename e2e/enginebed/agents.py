"""Sessions of coding agents and SDKs, in the words and with the headers that each sends. `KINDS` lists them.

    Agent ─ ask ─▶ Ask (path, headers, body) ─▶ Envoy ─▶ engine ─ Answer ─▶ Agent, one turn longer

An agent works as its kind does: a question, then a few turns that each bring the results of the tools which
the last answer is taken to have called. Of the answer, text and thoughts go into the next prompt as the
engine gave them, so that what it cached is asked for again. A sub-agent has a conversation of its own and
names its parent.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

from zstandard import ZstdCompressor

from enginebed.conversations import WIRES, Api, Object, Usage, text

LONGEST_TOKENS = 6000
"""A session whose prompt has become longer is over, and another one of its kind begins."""


class Thinks(StrEnum):
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    streams: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the engine said: its words, its thoughts, and what it counted."""

    text: str
    thoughts: str
    usage: Usage
    id: str = ""


@dataclass(slots=True, kw_only=True)
class Step:
    """One turn of a history: what the user or a tool said, and then the agent's answer and its calls."""

    said: str
    results: list[tuple[str, str]] = field(default_factory=list)
    """Call and output of the tools that the turn before has called."""
    answer: Answer | None = None
    calls: list[tuple[str, str, Object]] = field(default_factory=list)
    """Id, tool and arguments."""


@dataclass(slots=True, kw_only=True)
class Agent:
    """One session of a kind."""

    kind: "Kind"
    model: str
    thinks: Thinks
    named: bool
    """Whether its headers name the session."""
    rng: Random
    session: str
    parent: str = ""
    """The session whose sub-agent it is; empty for none."""
    system: str = ""
    steps: list[Step] = field(default_factory=list)

    def ask(self) -> Ask:
        """Return the next turn's request."""
        last = self.steps[-1] if self.steps else None
        if last is not None and last.calls:
            results = [(call, text(self.rng, self.rng.randrange(4, 40), True)) for call, _, _ in last.calls]
            self.steps.append(Step(said="", results=results))
        else:
            self.steps.append(Step(said=text(self.rng, self.rng.randrange(8, 50), True)))
        body = {"model": self.model, **self.kind.body(self)}
        headers = {"content-type": "application/json"} | (self.kind.headers(self) if self.named else {})
        written = json.dumps(body, ensure_ascii=self.kind.ascii).encode()
        if self.kind.compresses:
            headers["content-encoding"], written = "zstd", ZstdCompressor().compress(written)
        return Ask(path=self.kind.path, headers=headers, body=written, streams=bool(body.get("stream")))

    def answered(self, answer: Answer) -> None:
        """Add the answer, and perhaps calls of tools."""
        step = self.steps[-1]
        step.answer = answer
        if self.rng.random() < 0.6:
            tools = [*TOOLS]
            for n in range(self.rng.choice((1, 1, 2))):
                arguments = {"path": text(self.rng, 1), "text": text(self.rng, 3, True)}
                step.calls.append((f"call_{len(self.steps)}_{n}", self.rng.choice(tools), arguments))
        if answer.usage.prompt > LONGEST_TOKENS:
            self.steps, self.session = [], f"{self.session}+"

    def unanswered(self) -> None:
        """Note that the request failed; the agent asks again, in other words."""
        self.steps.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A program."""

    name: str
    api: Api
    body: Callable[[Agent], Object]
    headers: Callable[[Agent], dict[str, str]]
    path: str
    compresses: bool = False
    ascii: bool = False
    """Whether it escapes what is not ASCII, as Python's json does."""
    thinking: tuple[Thinks, ...] = (Thinks.ON, Thinks.OFF)
    sub_agents: bool = False


TOOLS: Mapping[str, str] = {
    "read_file": "Reads a file – with line numbers",
    "edit": "Replaces a text in a file",
    "shell": "Runs a command; its output is cut at 30,000 characters",
}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "An absolute path"},
        "text": {"type": "string", "description": "Text, e.g. “naïve”"},
        "timeout": {"type": "integer", "minimum": 1},
    },
    "required": ["path"],
    "additionalProperties": False,
}


def _function(name: str) -> Object:
    return {"name": name, "description": TOOLS[name], "parameters": _PARAMETERS}


def _limit(of: Agent) -> int:
    return of.rng.randrange(4, 40)


# Codex: Responses, stateless, with reasoning items and a custom tool


def _codex(of: Agent) -> Object:
    context = {"type": "input_text", "text": f"<environment_context>{of.session}</environment_context>"}
    items: list[Object] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": of.system}]},
        {"type": "message", "role": "user", "content": [context]},
    ]
    custom: set[str] = set()
    for step in of.steps:
        for call, output in step.results:
            kind = "custom_tool_call_output" if call in custom else "function_call_output"
            items.append({"type": kind, "call_id": call, "output": output})
        if step.said:
            content = [{"type": "input_text", "text": step.said}]
            items.append({"type": "message", "role": "user", "content": content})
        if step.answer is None:
            continue
        if step.answer.thoughts:
            thought = {"type": "reasoning_text", "text": step.answer.thoughts}
            items.append({"type": "reasoning", "summary": [], "content": [thought]})
        if step.answer.text:
            said = [{"type": "output_text", "text": step.answer.text}]
            items.append({"type": "message", "role": "assistant", "content": said})
        for call, tool, arguments in step.calls:
            if tool == "edit":
                custom.add(call)
                item = {
                    "type": "custom_tool_call",
                    "name": "apply_patch",
                    "input": f"*** {arguments['text']}\n",
                }
            else:
                item = {"type": "function_call", "name": tool, "arguments": json.dumps(arguments)}
            items.append({**item, "call_id": call})
    functions = [{"type": "function", "strict": False, **_function(name)} for name in ("shell", "read_file")]
    patch = {
        "type": "custom",
        "name": "apply_patch",
        "description": TOOLS["edit"],
        "format": {"type": "text"},
    }
    return {
        "instructions": "You are a coding agent running in a terminal.",
        "input": items,
        "tools": [*functions, patch, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"}
        if of.thinks is Thinks.ON
        else {"effort": "none"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": of.session,
        "max_output_tokens": _limit(of),
    }


def _codex_headers(of: Agent) -> dict[str, str]:
    parent = {"x-codex-parent-thread-id": of.parent} if of.parent else {}
    return {"originator": "codex_cli_rs", "session_id": of.session, "thread-id": of.session, **parent}


# Claude Code: Messages, with thinking, cache marks, reminders and sub-agents


def _claude(of: Agent) -> Object:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[Object] = []
    for n, step in enumerate(of.steps):
        content: list[Object] = [
            {
                "type": "tool_result",
                "tool_use_id": call,
                "content": [{"type": "text", "text": output}],
                "is_error": False,
            }
            for call, output in step.results
        ]
        if step.said:
            reminder = f"<system-reminder>{text(Random(n), 9)}</system-reminder>"
            content += [{"type": "text", "text": reminder}, {"type": "text", "text": step.said}]
        if step is of.steps[-1]:
            content[-1] = content[-1] | cached
        messages.append({"role": "user", "content": content})
        if n % 4 == 2:
            messages.append({"role": "system", "content": f"Todo list: {text(Random(n + 1), 6)}"})
        if step.answer is None:
            continue
        said: list[Object] = []
        if step.answer.thoughts:
            said.append({"type": "thinking", "thinking": step.answer.thoughts, "signature": "sig"})
        if step.answer.text:
            said.append({"type": "text", "text": step.answer.text})
        said += [
            {"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given in step.calls
        ]
        messages.append({"role": "assistant", "content": said or [{"type": "text", "text": "(no content)"}]})
    billing = f"x-anthropic-billing-header: cc_version=2.1; cch={len(of.steps):05x}"
    identity = "You are Claude Code, Anthropic's official CLI for Claude."
    return {
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": identity, **cached},
            {"type": "text", "text": of.system, **cached},
        ],
        "messages": messages,
        "tools": [
            {"name": name, "description": words, "input_schema": _PARAMETERS} for name, words in TOOLS.items()
        ],
        "thinking": {"type": "adaptive"} if of.thinks is Thinks.ON else {"type": "disabled"},
        "metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": of.session})}
        if of.named
        else {},
        "max_tokens": _limit(of),
        "stream": True,
    }


def _claude_headers(of: Agent) -> dict[str, str]:
    headers = {
        "anthropic-version": "2023-06-01",
        "x-app": "cli",
        "user-agent": "claude-cli/2.1 (external, cli)",
    }
    if not of.parent:
        return headers | {"x-claude-code-session-id": of.session}
    return headers | {"x-claude-code-session-id": of.parent, "x-claude-code-agent-id": of.session}


# OpenCode, Qwen Code, and OpenAI's SDK: chat completions


def _chat(of: Agent, part: Callable[[str], Any], reasoning: str) -> list[Object]:
    messages: list[Object] = [{"role": "system", "content": part(of.system)}]
    for step in of.steps:
        for call, output in step.results:
            messages.append({"role": "tool", "tool_call_id": call, "content": output})
        if step.said:
            messages.append({"role": "user", "content": part(step.said)})
        if step.answer is None:
            continue
        message: Object = {"role": "assistant", "content": step.answer.text or None}
        if step.answer.thoughts and reasoning:
            message[reasoning] = step.answer.thoughts
        if step.calls:
            message["tool_calls"] = [
                {
                    "id": call,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for call, name, arguments in step.calls
            ]
        elif not step.answer.text:
            message["content"] = ""
        messages.append(message)
    return messages


def _chat_tools() -> list[Object]:
    return [{"type": "function", "function": _function(name)} for name in TOOLS]


def _opencode(of: Agent) -> Object:
    return {
        "messages": _chat(of, str, "reasoning_content"),
        "tools": _chat_tools(),
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": _limit(of),
        **({"reasoning_effort": "none"} if of.thinks is Thinks.OFF else {}),
    }


def _opencode_headers(of: Agent) -> dict[str, str]:
    parent = {"x-opencode-parent-session": of.parent} if of.parent else {}
    return {"user-agent": "opencode/1.0 ai-sdk/openai-compatible", "x-opencode-session": of.session, **parent}


def _qwen_code(of: Agent) -> Object:
    def part(words: str) -> list[Object]:
        return [{"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}]

    return {
        "messages": _chat(of, part, "reasoning_content"),
        "tools": _chat_tools(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": _limit(of),
        "chat_template_kwargs": {"enable_thinking": of.thinks is Thinks.ON},
        "metadata": {"sessionId": of.session, "promptId": f"{of.session}########{len(of.steps)}"},
    }


def _session_headers(of: Agent) -> dict[str, str]:
    parent = {"x-parent-session-id": of.parent} if of.parent else {}
    return {"x-session-id": of.session, **parent}


def _openai_chat(of: Agent) -> Object:
    return {
        "messages": _chat(of, str, ""),
        "tools": _chat_tools(),
        "max_completion_tokens": _limit(of),
        **({"reasoning_effort": "low"} if of.thinks is Thinks.ON else {}),
    }


def _openai_responses(of: Agent) -> Object:
    return {name: value for name, value in _codex(of).items() if name not in ("stream", "include")} | {
        "conversation": f"conv_{of.session}"
    }


def _anthropic_sdk(of: Agent) -> Object:
    body = _claude(of)
    return body | {"system": of.system, "stream": False, "metadata": {}, "output_config": {"effort": "low"}}


def _no_headers(of: Agent) -> dict[str, str]:
    return {}


_CHAT, _RESPONSES, _MESSAGES = (WIRES[api].path for api in (Api.CHAT, Api.RESPONSES, Api.MESSAGES))
KINDS = (
    Kind(
        name="Codex",
        api=Api.RESPONSES,
        body=_codex,
        headers=_codex_headers,
        path=_RESPONSES,
        compresses=True,
        sub_agents=True,
    ),
    Kind(
        name="Claude Code",
        api=Api.MESSAGES,
        body=_claude,
        headers=_claude_headers,
        path=f"{_MESSAGES}?beta=true",
        sub_agents=True,
    ),
    Kind(
        name="OpenCode",
        api=Api.CHAT,
        body=_opencode,
        headers=_opencode_headers,
        path=_CHAT,
        sub_agents=True,
    ),
    Kind(name="Qwen Code", api=Api.CHAT, body=_qwen_code, headers=_session_headers, path=_CHAT),
    Kind(
        name="OpenAI SDK", api=Api.CHAT, body=_openai_chat, headers=_session_headers, path=_CHAT, ascii=True
    ),
    Kind(
        name="OpenAI SDK",
        api=Api.RESPONSES,
        body=_openai_responses,
        headers=_session_headers,
        path=_RESPONSES,
        ascii=True,
    ),
    Kind(
        name="Anthropic SDK",
        api=Api.MESSAGES,
        body=_anthropic_sdk,
        headers=_session_headers,
        path=_MESSAGES,
        ascii=True,
    ),
)


def sessions(model: str, seed: int) -> Iterator[Agent]:
    """Yield sessions of every kind, thinking or not, whose headers name them or do not, some with a
    sub-agent."""
    for kind in KINDS:
        for thinks in kind.thinking:
            for named in (True, False):
                name = f"{kind.name} {kind.api} {thinks} {seed}".replace(" ", "-").lower()
                system = text(Random(f"{seed} {kind.name}"), 120, True)
                made = Agent(
                    kind=kind,
                    model=model,
                    thinks=thinks,
                    named=named,
                    rng=Random(f"{name} {named}"),
                    session=name,
                    system=system,
                )
                yield made
                if named and kind.sub_agents:
                    yield Agent(
                        kind=kind,
                        model=model,
                        thinks=thinks,
                        named=True,
                        rng=Random(f"{name} child"),
                        session=f"{name}-child",
                        parent=name,
                        system=f"{system} {text(Random(f'{name} sub'), 20)}",
                    )


def count_tokens(of: Agent) -> Ask:
    """Return Claude Code's question how long the prompt has become, which it asks between turns."""
    body = _claude(of)
    kept = {name: body[name] for name in ("system", "messages", "tools", "thinking")}
    headers = {"content-type": "application/json", **_claude_headers(of)}
    written = json.dumps({"model": of.model, **kept}).encode()
    return Ask(path=f"{_MESSAGES}/count_tokens?beta=true", headers=headers, body=written, streams=False)


# Answers


def read(api: Api, body: bytes, streams: bool) -> Answer:
    """Return what a body with status 200 says."""
    events = [*_events(body)] if streams else [json.loads(body)]
    match api:
        case Api.CHAT:
            return _read_chat(events)
        case Api.RESPONSES:
            return _read_responses(events)
        case Api.MESSAGES:
            return _read_messages(events)
    raise AssertionError(api)


def _events(body: bytes) -> Iterator[Object]:
    for line in body.decode().splitlines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _read_chat(events: list[Object]) -> Answer:
    said = [
        choice.get("delta") or choice.get("message") or {}
        for event in events
        for choice in event.get("choices") or ()
    ]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return Answer(
        text="".join(part.get("content") or "" for part in said),
        thoughts="".join(part.get("reasoning") or part.get("reasoning_content") or "" for part in said),
        usage=WIRES[Api.CHAT].usage(usage),
    )


def _read_responses(events: list[Object]) -> Answer:
    last = events[-1]
    response = last.get("response", last)
    said, thoughts = "", ""
    for item in response["output"]:
        words = "".join(part.get("text") or "" for part in item.get("content") or ())
        if item["type"] == "reasoning":
            thoughts += words
        elif item["type"] == "message":
            said += words
    usage = WIRES[Api.RESPONSES].usage(response["usage"])
    return Answer(text=said, thoughts=thoughts, usage=usage, id=response["id"])


def _read_messages(events: list[Object]) -> Answer:
    said, thoughts, usage = "", "", dict[str, Any]()
    for event in events:
        for block in event.get("content") or ():
            said += block.get("text") or ""
            thoughts += block.get("thinking") or ""
        delta = event.get("delta") or {}
        said += delta.get("text") or ""
        thoughts += delta.get("thinking") or ""
        usage |= event.get("message", {}).get("usage") or event.get("usage") or {}
    return Answer(text=said, thoughts=thoughts, usage=WIRES[Api.MESSAGES].usage(usage))

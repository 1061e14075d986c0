"""What the server writes: whole answers and SSE events of the four APIs, as vLLM writes them.

A `Form` renders one request's answer. Streams are rendered many tokens at a time, but every token has its
own event, as from the real server: the constant part around a token is made once per request, so a token
costs about 0.3 µs.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from perilune_lab.engine.inbound import Api, Inbound

_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int
    cached: int
    output: int

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.output,
            "completion_tokens": self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Form(Protocol):
    """Renders one answer: `begin`, then `tokens` any number of times, then `end`; or only `whole`."""

    def begin(self) -> bytes:
        """Return the events before the first token."""

    def tokens(self, pieces: Sequence[str], ids: Sequence[int], finish: str | None) -> bytes:
        """Return one event per token; `finish` marks the last one of the answer."""

    def end(self, text: str, usage: Usage, finish: str) -> bytes:
        """Return the events after the last token."""

    def whole(self, text: str, ids: Sequence[int], usage: Usage, finish: str) -> bytes:
        """Return the answer to a request that is not streamed."""


def form_for(inbound: Inbound, answer_id: str) -> Form:
    match inbound.api:
        case Api.CHAT | Api.COMPLETIONS:
            return OpenAiForm(inbound, answer_id)
        case Api.RESPONSES:
            return ResponsesForm(inbound, answer_id)
        case Api.MESSAGES:
            return MessagesForm(inbound, answer_id)


def error_body(message: str, status: int, kind: str, param: str | None) -> bytes:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_event(api: Api, message: str, status: int, kind: str) -> bytes:
    """Return the event that ends a stream that has begun, since its status cannot change any more."""
    if api is Api.MESSAGES:
        return _sse({"type": "error", "error": {"type": kind, "message": message}}, "error")
    error = b"data: " + error_body(message, status, kind, None) + b"\n\n"
    return error if api is Api.RESPONSES else error + DONE


def _sse(data: object, event: str = "") -> bytes:
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + _json(data) + b"\n\n"


def _around(event: bytes) -> tuple[bytes, bytes]:
    """Split a prepared event at the mark, where the token's text goes. JSON writes the mark as an escape."""
    before, after = event.split(_json("\x00"))
    return before, after


def _repeat(cut: tuple[bytes, bytes], pieces: Sequence[str]) -> bytes:
    if not pieces:
        return b""
    before, after = cut
    return before + (after + before).join([_json(piece) for piece in pieces]) + after


@dataclass(slots=True)
class OpenAiForm:
    """/v1/chat/completions and /v1/completions."""

    inbound: Inbound
    answer_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def begin(self) -> bytes:
        if self.inbound.api is Api.COMPLETIONS:
            return b""
        chunk = self._chunk({"delta": {"role": "assistant", "content": ""}}, None)
        chunk["prompt_token_ids"] = self.inbound.prompt if self.inbound.return_token_ids else None
        return _sse(chunk)

    def tokens(self, pieces: Sequence[str], ids: Sequence[int], finish: str | None) -> bytes:
        if self.inbound.return_token_ids:
            last = len(ids) - 1
            return b"".join(
                _sse(self._chunk(self._text(piece), finish if i == last else None, [token]))
                for i, (piece, token) in enumerate(zip(pieces, ids, strict=True))
            )
        plain = pieces if finish is None else pieces[:-1]
        out = _repeat(_around(_sse(self._chunk(self._text("\x00"), None))), plain)
        if finish is not None:
            out += _sse(self._chunk(self._text(pieces[-1]), finish))
        return out

    def end(self, text: str, usage: Usage, finish: str) -> bytes:
        if not self.inbound.include_usage:
            return DONE
        return _sse({**self._head(".chunk"), "choices": [], "usage": usage.openai()}) + DONE

    def whole(self, text: str, ids: Sequence[int], usage: Usage, finish: str) -> bytes:
        chat = self.inbound.api is Api.CHAT
        content = (
            {"message": {"role": "assistant", "content": text, "tool_calls": []}} if chat else {"text": text}
        )
        token_ids = list(ids) if self.inbound.return_token_ids else None
        choice = {
            "index": 0,
            **content,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": token_ids,
        }
        answer = {**self._head(""), "choices": [choice], "usage": usage.openai()}
        prompt_ids = self.inbound.prompt if self.inbound.return_token_ids else None
        (answer if chat else choice)["prompt_token_ids"] = prompt_ids
        return _json(answer)

    def _text(self, piece: str) -> dict[str, Any]:
        return {"delta": {"content": piece}} if self.inbound.api is Api.CHAT else {"text": piece}

    def _head(self, kind: str) -> dict[str, Any]:
        of = f"chat.completion{kind}" if self.inbound.api is Api.CHAT else "text_completion"
        return {"id": self.answer_id, "object": of, "created": self.created, "model": self.inbound.model}

    def _chunk(
        self, text: Mapping[str, Any], finish: str | None, ids: list[int] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": finish, "token_ids": ids}
        return {**self._head(".chunk"), "choices": [choice]}


@dataclass(slots=True)
class ResponsesForm:
    """/v1/responses. Every event carries its type twice and a running number."""

    inbound: Inbound
    answer_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    number: int = 0

    def begin(self) -> bytes:
        item = {**self._item("", "in_progress"), "content": []}
        return (
            self._event("response.created", response=self._response("in_progress", [], None))
            + self._event("response.in_progress", response=self._response("in_progress", [], None))
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place(), part=_output_text(""))
        )

    def tokens(self, pieces: Sequence[str], ids: Sequence[int], finish: str | None) -> bytes:
        return b"".join(
            self._event("response.output_text.delta", **self._place(), delta=piece, logprobs=[])
            for piece in pieces
        )

    def end(self, text: str, usage: Usage, finish: str) -> bytes:
        status = _status(finish)
        item = self._item(text, status)
        name = "response.completed" if status == "completed" else "response.incomplete"
        return (
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=_output_text(text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(name, response=self._response(status, [item], usage))
        )

    def whole(self, text: str, ids: Sequence[int], usage: Usage, finish: str) -> bytes:
        status = _status(finish)
        return _json(self._response(status, [self._item(text, status)], usage))

    def _event(self, name: str, **fields: Any) -> bytes:
        event = {"type": name, "sequence_number": self.number, **fields}
        self.number += 1
        return _sse(event, name)

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.answer_id}", "output_index": 0, "content_index": 0}

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{self.answer_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_output_text(text)],
        }

    def _response(self, status: str, output: list[Any], usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "model": self.inbound.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": usage
            and {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.output,
            },
        }


def _status(finish: str) -> str:
    return "incomplete" if finish == "length" else "completed"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


@dataclass(slots=True)
class MessagesForm:
    """/v1/messages, Anthropic's API. `input_tokens` counts what was not read from the cache."""

    inbound: Inbound
    answer_id: str

    def begin(self) -> bytes:
        message = {
            **self._message([], None),
            "usage": {"input_tokens": len(self.inbound.prompt), "output_tokens": 0},
        }
        block = {"type": "text", "text": ""}
        return _sse({"type": "message_start", "message": message}, "message_start") + _sse(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )

    def tokens(self, pieces: Sequence[str], ids: Sequence[int], finish: str | None) -> bytes:
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "\x00"}}
        return _repeat(_around(_sse(delta, "content_block_delta")), pieces)

    def end(self, text: str, usage: Usage, finish: str) -> bytes:
        delta = {"stop_reason": _stop_reason(finish), "stop_sequence": None}
        return (
            _sse({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + _sse({"type": "message_delta", "delta": delta, "usage": _anthropic(usage)}, "message_delta")
            + _sse({"type": "message_stop"}, "message_stop")
        )

    def whole(self, text: str, ids: Sequence[int], usage: Usage, finish: str) -> bytes:
        content = [{"type": "text", "text": text}]
        return _json({**self._message(content, _stop_reason(finish)), "usage": _anthropic(usage)})

    def _message(self, content: list[Any], stop: str | None) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.inbound.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
        }


def _stop_reason(finish: str) -> str:
    return "max_tokens" if finish == "length" else "end_turn"


def _anthropic(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }

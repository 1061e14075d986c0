"""Request bodies of a trace's turns: text generated from the keys of their segments, or what the model said.

A chat is valid for OpenAI: an answer that tool results follow calls these tools (`tool_calls`), and each
result names its call (`tool_call_id`). A tool result that follows no answer is sent as a user's message.

Cost: a prompt's text is encoded once; 64 MiB of it are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import msgspec
from xxhash import xxh3_64_hexdigest

from perilune_lab.traces.model import Role, Segment, Session, Style, Turn

Words = Callable[[str, int], str]
"""(key, tokens) → text of that many tokens; equal arguments, equal text."""

CACHED_BYTES = 64 * 2**20
_CALL = b'{"id":"%s","type":"function","function":{"name":"work","arguments":"{}"}}'


class Bodies:
    """Keeps the JSON text of segments (bounded) and of open sessions' answers."""

    def __init__(self, model: str, style: Style, words: Words) -> None:
        self._model = msgspec.json.encode(model)
        self._style = style
        self._words = words
        self._pieces: OrderedDict[Segment, bytes] = OrderedDict()
        self._pieces_bytes = 0
        self._answers: dict[str, bytes] = {}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self._style is Style.CHAT else "/v1/completions"

    def build(self, turn: Turn) -> bytes:
        """Return the request of a turn: streamed, with usage, and with exactly as many output tokens as the
        trace says (`ignore_eos` and `min_tokens` are vLLM's)."""
        if self._style is Style.CHAT:
            prompt = b'"messages":[%s]' % b",".join(self._messages(turn.prompt))
        else:
            prompt = b'"prompt":"%s"' % b"".join(self._piece(segment) for segment in turn.prompt)
        n = turn.output_tokens
        return (
            b'{"model":%s,%s,"max_tokens":%d,"min_tokens":%d,"ignore_eos":true,"temperature":0,"stream":true,'
            b'"stream_options":{"include_usage":true}}' % (self._model, prompt, n, n)
        )

    def answered(self, turn: Turn, text: str) -> None:
        """Store what the model answered; it replaces the generated text of its segment in later prompts."""
        self._answers[turn.answer.key] = _json_text(text)

    def forget(self, session: Session) -> None:
        for turn in session.turns:
            self._answers.pop(turn.answer.key, None)

    def _messages(self, prompt: Sequence[Segment]) -> Iterator[bytes]:
        waiting: list[bytes] = []
        """Ids of the calls that tool results have not answered yet."""
        for at, segment in enumerate(prompt, 1):
            role, more = segment.role, b""
            match role:
                case Role.ASSISTANT:
                    results = takewhile(lambda after: after.role is Role.TOOL, prompt[at:])
                    waiting = [_call_id(i, result) for i, result in enumerate(results)]
                    if waiting:
                        more = b',"tool_calls":[%s]' % b",".join(map(_CALL.__mod__, waiting))
                case Role.TOOL if waiting:
                    more = b',"tool_call_id":"%s"' % waiting.pop(0)
                case Role.TOOL:
                    role = Role.USER
            yield b'{"role":"%s","content":"%s"%s}' % (role.encode(), self._piece(segment), more)

    def _piece(self, segment: Segment) -> bytes:
        if segment.role is Role.ASSISTANT and segment.key in self._answers:
            return self._answers[segment.key]
        piece = self._pieces.get(segment)
        if piece is not None:
            self._pieces.move_to_end(segment)
            return piece
        piece = _json_text(self._words(segment.key, segment.tokens))
        self._pieces[segment] = piece
        self._pieces_bytes += len(piece)
        while self._pieces_bytes > CACHED_BYTES:
            _, dropped = self._pieces.popitem(last=False)
            self._pieces_bytes -= len(dropped)
        return piece


def _call_id(number: int, result: Segment) -> bytes:
    """Return the id of a call. Equal prompts have equal ids, since some templates write them."""
    return b"call_%s%d" % (xxh3_64_hexdigest(result.key.encode()).encode(), number)


def _json_text(text: str) -> bytes:
    """Return `text` as the inside of a JSON string, without the quotes."""
    return msgspec.json.encode(text)[1:-1]

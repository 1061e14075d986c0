"""Text ↔ token ids of one engine, and the answers that it gives.

There is no model, so the answer is a function of the prompt: words chosen by its
hash, the same on every engine and at every temperature. Words are single tokens wherever they stand, so a
later prompt that quotes the answer tokenizes to the very ids that were generated, and finds their blocks.

`LabText` speaks the lab's generated vocabulary, fast; `ModelText` a model's own tokenizer.json with its chat
template. `load` looks which one a folder holds.
"""

import json
import random
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import xxhash

from perilune_lab.chat import CHAT_TEMPLATE, arguments_of, content_of, tool_of
from perilune_lab.vocabulary import BYTES, LabTokenizer, Vocabulary

Messages = Sequence[Mapping[str, Any]]

_FIRST_WORDS = 64
_FOLLOWING_WORDS = 1024


class Text(Protocol):
    """What the server needs of a tokenizer. `chat` raises TypeError, KeyError or ValueError for messages that
    have not the API's form."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text. `special`: with the ids that the tokenizer puts around it."""

    def chat(self, messages: Messages, tools: Messages, special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token's own text; together they are `decode(ids)`."""

    def answer(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """Return what the model says to this prompt; a longer answer extends a shorter one."""


def key_of(prompt: Sequence[int]) -> int:
    """Return a number that identifies a prompt."""
    return xxhash.xxh3_64_intdigest(array("I", prompt).tobytes())


class LabText:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = LabTokenizer(vocabulary)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text)

    def chat(self, messages: Messages, tools: Messages, special: bool = False) -> list[int]:
        return self._tokenizer.encode_chat(messages, tools)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        tokens = self._vocabulary.tokens
        return [tokens[i] for i in ids]

    def answer(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        return self._vocabulary.ids_for(key_of(prompt), n_tokens)


class ModelText:
    """A model's tokenizer, from a folder with tokenizer.json and tokenizer_config.json. Raises ValueError if
    these cannot be used."""

    def __init__(self, folder: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # only this class needs these two
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(_template(folder), globals=_special_tokens(folder))
        self._first, self._following = self._find_words()
        if not self._first or not self._following:
            raise ValueError(f"{folder}: no words in this vocabulary survive being tokenized again")
        self._decode_one = lru_cache(maxsize=65_536)(lambda token: self.decode([token]))

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def chat(self, messages: Messages, tools: Messages, special: bool = False) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self._template.render(
                messages=[_plain(message) for message in messages],
                tools=[tool_of(tool) for tool in tools] or None,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses: {error}") from None
        return self.encode(text, special)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._following.get(token) or self._decode_one(token) for token in ids]

    def answer(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        rng = random.Random(key_of(prompt))
        return [rng.choice(self._first), *rng.choices(list(self._following), k=n_tokens - 1)]

    def _find_words(self) -> tuple[list[int], dict[int, str]]:
        """Return the tokens that stay themselves when their text is tokenized again: words to begin with, and
        other words to follow (with their text, a space before it)."""
        first: list[int] = []
        following: dict[int, str] = {}
        vocabulary = range(self._tokenizer.get_vocab_size())
        for token in vocabulary:
            word = self.decode([token])
            if _is_word(word) and token in self.encode(f"\n{word} a", False):
                first.append(token)
                if len(first) == _FIRST_WORDS:
                    break
        if first:
            begin = self.decode(first[:1])
            for token in set(vocabulary).difference(first):
                text = self.decode([first[0], token])
                word = text.removeprefix(begin + " ")
                if word != text and _is_word(word) and self.encode(text, False) == [first[0], token]:
                    following[token] = " " + word
                    if len(following) == _FOLLOWING_WORDS:
                        break
        return first, following


def _is_word(text: str) -> bool:
    return len(text) > 2 and text.isascii() and text.isalpha() and text.islower()


def load(folder: Path | None) -> Text:
    """Load the tokenizer in `folder`, or the lab's own for None. Raises OSError and ValueError."""
    vocabulary = Vocabulary()
    if folder is None or _is_lab(folder, vocabulary):
        return LabText(vocabulary)
    return ModelText(folder)


def _is_lab(folder: Path, vocabulary: Vocabulary) -> bool:
    """Return whether the folder was written from this vocabulary."""
    model = json.loads((folder / "tokenizer.json").read_bytes()).get("model", {})
    names = {f"<0x{i:02X}>": i for i in range(BYTES)} | dict(vocabulary.ids)
    return bool(model.get("vocab") == names) and _template(folder) == CHAT_TEMPLATE


def _template(folder: Path) -> str:
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    template = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if template is None and file.exists():
        template = file.read_text()
    if not isinstance(template, str):
        raise ValueError(f"{folder}: no chat template in tokenizer_config.json or chat_template.jinja")
    return template


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the tokens that a template may name, such as `bos_token`."""
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    tokens = {
        name: config[name]
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(name)
    }
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as vLLM passes it to a template."""
    plain = {**message, "content": content_of(message)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments_of(call)}}


def _refuse(message: str) -> None:
    raise ValueError(message)

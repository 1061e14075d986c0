"""Synthetic text with an exact token count, and the tokenizer that counts it.

A vocabulary of 4,096 made-up words (`ba`, `nit`, `robi`; short ones are frequent, 4 bytes a token with
the space, as real prompts). Every text is words, each led by one space, and one word is one token, so:

- `words_for(key, n)` has exactly n tokens; equal keys give equal text, a longer text of a key extends a
  shorter one, and different keys differ within the first six tokens (they spell a hash of the key);
- concatenated texts concatenate their tokens.

Steps of `words_for`: six words from a 64-bit hash of the key → runs of 64 words, joined beforehand, chosen
by a generator that starts from that hash → cut the last run. Some hundred million tokens a second.

`write_tokenizer` writes the same vocabulary as a Hugging Face tokenizer with a chat template, for programs
that load the model's files. It splits at white space, takes known words whole, and spells anything else
as UTF-8 bytes: no text fails. `LabTokenizer` does the same without those libraries, several times faster,
and renders the same chat format by hand; tests compare the two. White space is not a token: neither
gives back the text's own spaces and newlines.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from perilune_lab.chat import CHAT_TEMPLATE, render_chat

END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
ROLES = ("system", "user", "assistant", "tool")
MARKS = ("Tools", "<tools>", "</tools>", "<tool_call>", "</tool_call>")
"""Text that the chat template adds, one token each. Each is longer than one character, since single
characters would be used to spell unknown words."""
BYTES = 256
"""Number of token ids that stand for single bytes (0–255)."""
BYTE_NAMES = tuple(f"<0x{i:02X}>" for i in range(BYTES))
WORDS = 4096
_KEY_WORDS = 6
"""Words that spell a key's 64-bit hash, 12 bits each."""
_RUN_TOKENS = 64
_RUNS = 1024


class Vocabulary:
    """The words of one seed, their token ids, and text made of them.

    Ids: bytes 0–255, then SPECIALS, ROLES, MARKS, then the words. About 15 ms to make, when a text is.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.seed = seed
        self.words = _make_words(self._rng)
        fixed = (*SPECIALS, *ROLES, *MARKS)
        self.first_word_id = BYTES + len(fixed)
        named = {text: BYTES + i for i, text in enumerate((*fixed, *self.words))}
        self.ids: Mapping[str, int] = named
        """Token text (words without their space, specials, roles, marks; not the bytes) → id."""
        self.size = BYTES + len(named)

    def words_for(self, key: int | str, n_tokens: int) -> str:
        """Return a text of exactly `n_tokens` tokens; every word has a leading space."""
        head = self._spell(self._key_ids(key)[:n_tokens])
        rest = n_tokens - _KEY_WORDS
        if rest <= 0:
            return head
        runs = list(self._runs(key, rest))
        texts = [self._run_texts[run] for run in runs[:-1]]
        return head + "".join(texts) + self._spell(self._run_ids[runs[-1]][: (rest - 1) % _RUN_TOKENS + 1])

    def ids_for(self, key: int | str, n_tokens: int) -> list[int]:
        """Return the token ids of `words_for(key, n_tokens)`."""
        ids = self._key_ids(key)
        for run in self._runs(key, n_tokens - _KEY_WORDS):
            ids += self._run_ids[run]
        return ids[:n_tokens]

    @cached_property
    def _run_ids(self) -> list[list[int]]:
        """The runs of words that texts are made of. They take most of the time, and an engine needs none."""
        ids = range(self.first_word_id, self.first_word_id + WORDS)
        frequency = list(accumulate(1 / (rank + 10) for rank in range(WORDS)))
        return [self._rng.choices(ids, cum_weights=frequency, k=_RUN_TOKENS) for _ in range(_RUNS)]

    @cached_property
    def _run_texts(self) -> list[str]:
        return [self._spell(ids) for ids in self._run_ids]

    @cached_property
    def tokens(self) -> list[str]:
        """Token id → text as it is written: words with their leading space, bytes as `<0xNN>`."""
        return [*BYTE_NAMES, *SPECIALS, *ROLES, *MARKS, *(" " + word for word in self.words)]

    def _key_ids(self, key: int | str) -> list[int]:
        digits = xxhash.xxh3_64_intdigest(str(key).encode(), seed=self.seed)
        return [self.first_word_id + (digits >> 12 * i & WORDS - 1) for i in range(_KEY_WORDS)]

    def _runs(self, key: int | str, n_tokens: int) -> Iterator[int]:
        """Yield the indices of the runs that cover n tokens; the same leading ones for every n."""
        count = -(-n_tokens // _RUN_TOKENS)
        name = b"%s/%d" % (str(key).encode(), self.seed)
        for start in range(0, count, 8):  # one hash gives eight indices of ten bits
            digits = xxhash.xxh3_128_intdigest(name, seed=start)
            for i in range(min(8, count - start)):
                yield digits >> 10 * i & _RUNS - 1

    def _spell(self, word_ids: Sequence[int]) -> str:
        return "".join([" " + self.words[i - self.first_word_id] for i in word_ids])


def _make_words(rng: random.Random) -> list[str]:
    """Return distinct pronounceable words, shortest first: ba (75), bat (750), bati."""
    consonants, vowels = "bdfghklmnprstvz", "aeiou"
    open_ = [c + v for c in consonants for v in vowels]
    closed = [syllable + c for syllable in open_ for c in "dklmnprstz"]
    double = [a + b for a in open_ for b in open_]
    for words in (open_, closed, double):
        rng.shuffle(words)
    return [*open_, *closed, *double][:WORDS]


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    """Write tokenizer.json and tokenizer_config.json with CHAT_TEMPLATE into `folder`, made if missing."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers  # an engine process never loads it

    # ignore_merges: a known word is one dictionary lookup; byte_fallback spells the others.
    model = models.BPE(vocab=_vocab(vocabulary), merges=[], ignore_merges=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1_000_000,
        "bos_token": None,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _vocab(vocabulary: Vocabulary) -> dict[str, int]:
    return {name: i for i, name in enumerate(BYTE_NAMES)} | dict(vocabulary.ids)


class LabTokenizer:
    """The vocabulary as a tokenizer: equal to the written one, in plain Python.

    White space only separates. `decode` therefore gives words with one leading space each, whatever the
    text had.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._known = _vocab(vocabulary)
        self._split = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")").split

    def encode(self, text: str) -> list[int]:
        """Turn any text into token ids, 10–20 M known words a second."""
        ids: list[int] = []
        known = self._known
        for piece in self._split(text):
            if piece in SPECIALS:
                ids.append(known[piece])
                continue
            words = _split_words(piece)
            try:
                ids += [known[word] for word in words]
            except KeyError:
                for word in words:
                    if (token := known.get(word)) is not None:
                        ids.append(token)
                    else:
                        ids += word.encode(errors="replace")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text. Runs of bytes are read as UTF-8 after a space. Raises IndexError for an
        id that is not in the vocabulary."""
        tokens = self.vocabulary.tokens
        if min(ids, default=BYTES) >= BYTES:
            return "".join([tokens[i] for i in ids])
        parts: list[str] = []
        spelled = bytearray()
        for i in ids:
            if i < BYTES:
                spelled.append(i)
                continue
            if spelled:
                parts.append(" " + spelled.decode(errors="replace"))
                spelled.clear()
            parts.append(tokens[i])
        if spelled:
            parts.append(" " + spelled.decode(errors="replace"))
        return "".join(parts)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation; see `render_chat`."""
        return self.encode(render_chat(messages, tools, add_generation_prompt))


def _split_words(text: str) -> list[str]:
    """Split at Unicode white space. Python's own split also takes the separators U+001C–U+001F, Unicode
    does not."""
    if any(mark in text for mark in "\x1c\x1d\x1e\x1f"):
        return [word for word in re.split(r"[^\S\x1c-\x1f]+", text) if word]
    return text.split()

"""Exact tokens of an agent's prompt: full by both libraries, and a turn that adds 2,000 tokens to 33,000.

Ratios against `tokenizers` in full, in CPU time of the same run, every round on new text. The vocabulary is
trained here, on Python's own sources, and so is small; real ones are ten times as large.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from perilune_api.pool import Model
from perilune_gateway.openai import ParsedRequest, parse
from perilune_gateway.tokens import Tokenizer, encoder
from perilune_gateway.tokens.encoder import Encoder, Library
from perilune_gateway.tokens.incremental import IncrementalEncoder

START, MORE = 33_000, 2_000
"""Tokens."""
ANSWER = "<|im_start|>assistant\n"
TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def sources() -> str:
    return "\n".join(
        p.read_text(errors="replace") for p in sorted(Path(json.__file__).parent.parent.glob("*.py"))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sources):
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources[:4_000_000].split("\n\n"), trainer)
    path = tmp_path_factory.mktemp("bench")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


class Talk:
    """Conversations of excerpts, none twice."""

    def __init__(self, sources: str, plain: Callable[[str], object]) -> None:
        self._sources, self._plain = sources, plain
        self._rng = random.Random(1)

    def messages(self, tokens: int) -> list[dict[str, str]]:
        said, length = [], 0
        while length < tokens:
            at = self._rng.randrange(len(self._sources) - 4000)
            text = f"{self._rng.random()} {self._sources[at : at + self._rng.randrange(200, 2500)]}"
            said.append({"role": ("user", "tool")[len(said) % 2], "content": text})
            length += len(self._plain(text)) + 5
        return said


def text_of(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + ANSWER


def cpu_us(step: Callable[[], object]) -> float:
    started = time.process_time()
    step()
    return (time.process_time() - started) * 1e6


def request(messages: list[dict[str, str]]) -> ParsedRequest:
    parsed = parse("/v1/chat/completions", json.dumps({"model": "m", "messages": messages}).encode())
    assert isinstance(parsed, ParsedRequest)
    return parsed


@pytest.mark.bench
def test_tokens(folder, sources, pytestconfig):
    rounds = max(5, pytestconfig.getoption("--rounds"))
    loading_us = cpu_us(lambda: encoder.load(folder))
    fast = encoder.load(folder)
    assert fast.library is Library.FASTOKENS
    text = (folder / "tokenizer.json").read_text()
    reference = encoder._reference(text)
    slow = Encoder(
        Library.TOKENIZERS,
        "",
        lambda prompt: reference(prompt, False),
        fast.around,
        lambda prompt: reference(prompt, True),
        fast.cuts,
    )
    talk = Talk(sources, fast.plain)
    names = ("tokenizers, full", "fastokens, first", "fastokens, full", "tokenizers, +2k", "fastokens, +2k")
    best = dict.fromkeys(names, float("inf"))
    for _ in range(rounds):
        start = talk.messages(START)
        whole, more = text_of(start), text_of(start + talk.messages(MORE))
        best[names[0]] = min(best[names[0]], cpu_us(lambda t=whole: slow.plain(t)))
        fresh = encoder.load(folder)
        best[names[1]] = min(best[names[1]], cpu_us(lambda f=fresh, t=whole: f.plain(t)))
        best[names[2]] = min(best[names[2]], cpu_us(lambda t=whole: fast.plain(t)))
        expected = list(slow.plain(more))
        for name, chosen in ((names[3], slow), (names[4], fast)):
            incremental = IncrementalEncoder(chosen, 7)
            incremental.encode(whole)
            best[name] = min(best[name], cpu_us(lambda i=incremental, t=more: i.encode(t)))
            assert list(incremental.encode(more).ids) == expected

    tokenizer = Tokenizer(Model("m", tokenizer=str(folder)))
    before, after = request(start), request(start + talk.messages(MORE))
    tokenizer._encode(before)
    best["a whole turn, +2k"] = cpu_us(lambda: tokenizer._encode(after))
    rendering_us = min(cpu_us(lambda: tokenizer._render(after, after.prompt)) for _ in range(rounds))

    full_us = best[names[0]]
    print(f"\n{len(whole.encode()):,} bytes, {len(slow.plain(whole)):,} tokens; +{MORE} tokens; CPU time")
    print(f"{'load and self-test':>22} {loading_us / 1000:10.1f} ms, once")
    for name, us in best.items():
        print(f"{name:>22} {us:10.0f} µs {full_us / us:8.1f} × faster than tokenizers, full")
    print(f"{'of it rendering':>22} {rendering_us:10.0f} µs (decode, normalise, template)")
    assert full_us >= 10 * best[names[3]]
    assert full_us >= 10 * best[names[4]]

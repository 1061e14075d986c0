"""A text's ids are those of the whole text, however much of it was known: against `tokenizers` itself."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from perilune_gateway.request.tokens import encoder
from perilune_gateway.request.tokens.cuts import cuts_of
from perilune_gateway.request.tokens.incremental import GRID as PLACES
from perilune_gateway.request.tokens.incremental import MAX_ENDS, NODE_BYTES, IncrementalEncoder, Why

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CORPUS = [
    "the user said hi to the assistant, it's 1234 o'clock\n\n  def f(x):\n\treturn x\r\n",
    "Éte\u0301 naïve 漢字 한국어 <|im_start|> user [INST] system",
] * 5
GRID = 16


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(pre_tokenizer, tokens, normalizer=None, model=None, before=()):
    tokenizer = HfTokenizer(model or models.BPE())
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    special = [token for token in tokens if not isinstance(token, AddedToken)]
    if isinstance(tokenizer.model, models.Unigram):
        trainer = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=["<unk>", *special], unk_token="<unk>", show_progress=False
        )
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([token for token in tokens if isinstance(token, AddedToken)])
    if before:
        name = before[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, tokenizer.token_to_id(name))]
        )
    return tokenizer


def plain(content, **flags):
    return AddedToken(content, **({"normalized": False} | flags))


TOKENIZERS = {
    "GPT-2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), CHATML),
    "GPT-2, a space before each piece": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=True), CHATML
    ),
    "Qwen": lambda: trained(split(GPT4), (*CHATML, plain("<think>"), plain("</think>")), normalizers.NFC()),
    "Llama 3": lambda: trained(split(GPT4), LLAMA, before=LLAMA),
    "digits and punctuation, lower case": lambda: trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.Punctuation(),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        CHATML,
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    ),
    "Metaspace at the beginning": lambda: trained(
        pre_tokenizers.Metaspace(prepend_scheme="first"), CHATML, model=models.BPE(unk_token="<|endoftext|>")
    ),
    "Metaspace always, Unigram": lambda: trained(
        pre_tokenizers.Metaspace(prepend_scheme="always"), CHATML, model=models.Unigram()
    ),
    "SentencePiece by normalizers": lambda: trained(
        None,
        CHATML,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        models.BPE(unk_token="<|endoftext|>", fuse_unk=True),
    ),
    "no added tokens": lambda: trained(split(GPT4), ()),
    "tokens that overlap": lambda: trained(
        split(GPT4),
        (*CHATML, "<|im_end|>\n", "|><|", "[INST]", "[[", "aa", "<<", "{{end}}", plain("NST")),
    ),
    "tokens that take spaces": lambda: trained(
        split(GPT4),
        (*CHATML, plain("<mask>", lstrip=True), plain("<pad>", rstrip=True), plain("word", single_word=True)),
    ),
    "tokens in normalized text": lambda: trained(
        split(GPT4), [AddedToken(t, normalized=True) for t in CHATML], normalizers.NFC()
    ),
    "tokens in normalized text that is the text": lambda: trained(
        split(GPT4), [plain("<|x|>"), *(AddedToken(t, normalized=True) for t in CHATML)]
    ),
}  # fmt: skip


@cache
def written(name: str) -> str:
    return TOKENIZERS[name]().to_str()


@cache
def encoders(name: str):
    """Return the file's encoder as the gateway loads it, the same file by tokenizers, and the reference."""
    text = written(name)
    tokenizer = HfTokenizer.from_str(text)
    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "fastokens", None)
        by_reference = encoder.of(text)
    return (
        encoder.of(text),
        by_reference,
        lambda prompt, special: tokenizer.encode(prompt, add_special_tokens=special).ids,
    )


# Prompts: pieces that are apt to go wrong, joined as templates join them, and then grown, cut and changed.

HAZARDS = [
    *CHATML, *LLAMA, "<|im_start|", "|im_end|>", "<|im_end|>\n", "[INST]", "[[", "[[INST]", "aa", "aaa",
    "<<", "<<|im_start|>", "<think>", "</think>", "<mask>", "  <mask>", "<pad> \n", "<pad> <mask>", "word",
    " word ", "<|im_end|>word<|im_end|>", "xword", "|><|", "<|im_end|><|im_start|>", "{{end}}", "{{{end}}",
    "<|x|>", "<|IM_START|>", "<|im_<|im_end|>end|>", "<|im_end|>\u0338", "<|im_start|>\u0338", "<\u0338",
    "\u0338", "\u0301", "e\u0301", "Å", "A\u030a", "\u1100\u1161\u11a8", "👩\u200d👩\u200d👧", "👍🏽", "🇩🇪",
    "\u200d", "\ufeff", "\u00a0", "\u2028", " ", "  ", "\n", "\n\n", "\r\n", "\t", "▁", "it's", "1234567",
    "user", '{"a": 1}', "漢字", "_", "ﬁ",
]  # fmt: skip
PIECES = st.one_of(
    st.sampled_from(HAZARDS),
    st.text(max_size=8),
    st.text(alphabet="ab <|>_im\n", max_size=30),
)
CONTENT = st.lists(PIECES, max_size=6).map("".join)
TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), CONTENT), min_size=1, max_size=6
)


def chatml(turns):
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    )


def llama(turns):
    said = (f"<|start_header_id|>{role}<|end_header_id|>\n\n{text.strip()}<|eot_id|>" for role, text in turns)
    return "<|begin_of_text|>" + "".join(said) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def bare(turns):
    return "".join(text for _, text in turns)


@st.composite
def prompts(draw):
    """Prompts one after the other, mostly each the last and more."""
    render = draw(st.sampled_from([chatml, chatml, llama, bare]))
    turns, texts = draw(TURNS), []
    for _ in range(draw(st.integers(1, 5))):
        texts.append(render(turns))
        match draw(st.sampled_from(["grow", "grow", "grow", "change", "compact", "fork", "cut"])):
            case "grow":
                turns = [*turns, *draw(TURNS)]
            case "change":
                at = draw(st.integers(0, len(turns) - 1))
                turns = turns[:at] + draw(TURNS) + turns[at + 1 :]
            case "compact":
                turns = turns[:1] + draw(TURNS)
            case "fork":
                turns = turns[: draw(st.integers(1, len(turns)))] + draw(TURNS)
            case "cut":
                texts.append(texts[-1][: draw(st.integers(0, len(texts[-1])))])
    return texts


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(25))
@given(
    texts=prompts(),
    special=st.booleans(),
    max_bytes=st.sampled_from([10**6, 10**6, 4000]),
    grid=st.sampled_from([16, 48]),
)
def test_ids_are_those_of_the_whole_text(name, texts, special, max_bytes, grid):
    *both, reference = encoders(name)
    for chosen in both:
        incremental = IncrementalEncoder(chosen, 7, max_bytes, grid)
        for text in texts:
            expected = list(reference(text, special))
            encoded = incremental.encode(text, special)
            assert list(encoded.ids) == expected, (chosen.library, text)
            assert encoded.encoded_bytes <= len(text.encode())
            assert incremental.held_bytes <= max_bytes


USUAL = ("GPT-2", "Qwen", "Llama 3", "SentencePiece by normalizers", "no added tokens")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] * (name not in USUAL)) for name in TOKENIZERS]
)
def test_hazards_at_every_place_of_the_grid(name):
    _, chosen, reference = encoders(name)
    for hazard in HAZARDS:
        for shift in range(GRID):
            start = f"<|endoftext|>{'x' * shift} {hazard}"
            for text in (start, f"{start} it's {hazard}{hazard}\n{'y' * GRID}<|im_end|>"):
                expected = list(reference(text, False))
                incremental = IncrementalEncoder(chosen, 7, grid=GRID)
                for _ in range(2):
                    assert list(incremental.encode(text).ids) == expected, text


CUTTABLE = {
    "GPT-2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "Qwen": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"],
    "Llama 3": list(LLAMA),
    "no added tokens": [],
    "tokens that overlap": ["{{end}}"],
    "tokens that take spaces": list(CHATML),
    "tokens in normalized text": [],
    "tokens in normalized text that is the text": ["<|x|>", *CHATML],
}


@pytest.mark.parametrize("name", CUTTABLE)
def test_the_tokens_where_a_text_may_be_cut_are_found(name):
    cuts = cuts_of(json.loads(written(name)))
    assert {token.decode() for token in cuts.tokens} == set(CUTTABLE[name])
    assert bool(cuts.why_none) is not bool(cuts.tokens)


def chat(characters, turns, seed=0):
    """Return a ChatML conversation of that size: turn after turn of words that say where they are."""
    said = [
        ("user", f"{seed} {turn} " + f"word{turn} it's " * (characters // turns // 12))
        for turn in range(turns)
    ]
    return chatml(said).removesuffix("<|im_start|>assistant\n")


def test_a_text_that_goes_on_is_kept_up_to_its_end():
    chosen, _, reference = encoders("Qwen")
    incremental = IncrementalEncoder(chosen, 7)
    start = chat(100_000, 40)
    first = incremental.encode(start + "<|im_start|>assistant\n")
    assert (first.kept_tokens, incremental.whole) == (0, {Why.UNKNOWN: 1})
    assert first.encoded_bytes == len(start) + len("<|im_start|>assistant\n")
    more = "<|im_start|>assistant\nit's done<|im_end|>\n<|im_start|>user\nthank you<|im_end|>\n"
    second = incremental.encode(start + more)
    assert list(second.ids) == list(reference(start + more, False))
    assert second.encoded_bytes == len(more)
    assert second.kept_tokens == len(reference(start, False))
    assert (incremental.hits, incremental.kept_tokens) == (1, second.kept_tokens)
    assert incremental.encoded_tokens == len(first.ids) + len(second.ids) - second.kept_tokens


def test_a_fork_keeps_what_it_shares():
    chosen, _, reference = encoders("Qwen")
    incremental = IncrementalEncoder(chosen, 7)
    start, other = chat(50_000, 20), chat(20_000, 5, seed=1)
    incremental.encode(start + chat(20_000, 5))
    held = incremental.held_bytes
    forked = incremental.encode(start + other)
    assert list(forked.ids) == list(reference(start + other, False))
    message = len(start) // 20
    assert len(other) < forked.encoded_bytes < len(other) + PLACES + message + 100
    assert incremental.held_bytes - held < 0.6 * held


def test_what_was_used_last_stays():
    chosen, _, _ = encoders("Qwen")
    one, other = chat(30_000, 10), chat(30_000, 10, seed=1)
    incremental = IncrementalEncoder(chosen, 7)
    incremental.encode(one)
    room = incremental.held_bytes
    parts = len(one) // PLACES + 1
    assert room == pytest.approx(4 * len(incremental.encode(one).ids) + NODE_BYTES * parts, rel=0.1)

    incremental = IncrementalEncoder(chosen, 7, max_bytes=int(2.5 * room))
    for seed in range(2, 12):
        incremental.encode(one)
        incremental.encode(chat(30_000, 10, seed))
        assert incremental.held_bytes <= 2.5 * room
    assert incremental.evicted > 0
    assert incremental.encode(one).kept_tokens > 0.99 * len(incremental.encode(one).ids)
    assert incremental.encode(other).kept_tokens == 0


def test_ends_that_are_remembered_are_few():
    chosen, _, reference = encoders("Qwen")
    incremental = IncrementalEncoder(chosen, 7)
    start = chat(10_000, 4)
    ends = [start + "x" * n + "<|im_end|>" for n in range(3 * MAX_ENDS)]
    for text in ends:
        incremental.encode(text)
    new = [len(reference(text, False)) - incremental.encode(text).kept_tokens for text in reversed(ends)]
    assert new[:MAX_ENDS] == [1] * MAX_ENDS, "the last cut token"
    assert min(new[MAX_ENDS:]) > 1


@pytest.mark.parametrize(
    ("name", "text", "special", "why"),
    [
        pytest.param("Qwen", "hi", False, Why.SHORT, id="short"),
        pytest.param("no added tokens", "hi " * 2000, False, Why.NO_CUT_TOKENS, id="no cut tokens"),
        pytest.param("Qwen", "hi " * 2000, False, Why.UNKNOWN, id="never seen"),
    ],
)
def test_why_a_text_was_encoded_whole(name, text, special, why):
    incremental = IncrementalEncoder(encoders(name)[0], 7)
    incremental.encode(text, special)
    assert incremental.whole == {why: 1}
    assert (incremental.hits, incremental.kept_tokens) == (0, 0)


def test_threads_share_what_they_remember():
    chosen, _, reference = encoders("Qwen")
    incremental = IncrementalEncoder(chosen, 7, max_bytes=200_000)
    texts = [chat(9_000 * n, 3 * n, seed) for seed in range(6) for n in (1, 2, 3)]
    expected = [list(reference(text, False)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: list(incremental.encode(texts[i % len(texts)]).ids), range(400)))
    assert found == [expected[i % len(texts)] for i in range(400)]
    assert incremental.held_bytes <= 200_000
    assert incremental.hits + incremental.whole[Why.UNKNOWN] == 400

"""The vocabulary, its text, and the two tokenizers that must agree on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from perilune_lab.vocabulary import (
    BYTES,
    SPECIALS,
    WORDS,
    LabTokenizer,
    Vocabulary,
    write_tokenizer,
)

VOCABULARY = Vocabulary()
LAB = LabTokenizer(VOCABULARY)
KEYS = st.integers() | st.text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCABULARY)
    return path


@pytest.fixture(scope="module")
def written(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_words_are_distinct_and_plain():
    assert len(set(VOCABULARY.words)) == len(VOCABULARY.words) == WORDS
    assert all(word.isalpha() and word.islower() and word.isascii() for word in VOCABULARY.words)
    assert VOCABULARY.size == len(VOCABULARY.tokens) == len(VOCABULARY.ids) + BYTES


def test_a_seed_makes_a_vocabulary():
    assert Vocabulary(1).words_for("a", 100) == Vocabulary(1).words_for("a", 100)
    assert Vocabulary(1).words_for("a", 100) != Vocabulary(2).words_for("a", 100)


@pytest.mark.parametrize("n", [0, 1, 5, 6, 7, 69, 70, 71, 134, 512, 5_000])
def test_text_has_exactly_n_tokens(n, written):
    text = VOCABULARY.words_for("key", n)
    assert len(text.split()) == n
    assert written.encode(text).ids == LAB.encode(text) == VOCABULARY.ids_for("key", n)
    assert LAB.decode(VOCABULARY.ids_for("key", n)) == text


@given(key=KEYS, n=st.integers(0, 300), more=st.integers(0, 300))
def test_a_longer_text_of_a_key_extends_a_shorter_one(key, n, more):
    text = VOCABULARY.words_for(key, n)
    assert VOCABULARY.words_for(key, n + more).startswith(text)
    assert LAB.encode(text) == VOCABULARY.ids_for(key, n)


def test_different_keys_differ_within_six_tokens():
    heads = {VOCABULARY.words_for(key, 6) for key in range(20_000)}
    assert len(heads) == 20_000


def test_bytes_per_token_are_those_of_real_prompts():
    text = VOCABULARY.words_for("any", 33_600)
    assert 3.5 < len(text) / 33_600 < 4.5


@given(st.lists(KEYS, max_size=4), st.integers(0, 80))
def test_tokens_of_joined_texts_are_joined(keys, n):
    texts = [VOCABULARY.words_for(key, n) for key in keys]
    assert LAB.encode("".join(texts)) == [token for text in texts for token in LAB.encode(text)]


PIECES = st.sampled_from(
    [" ba", " tool", "<tools>", "\n", "\x1c", "\x85", "\u2003", "é", " zz", "<0x41>", *SPECIALS]
)


@given(text=st.text() | st.lists(PIECES).map("".join))
def test_both_tokenizers_agree_on_any_text(text, written):
    assert LAB.encode(text) == written.encode(text, add_special_tokens=False).ids


def test_unknown_text_is_spelled_in_bytes():
    assert LAB.encode(" ba xyé") == [VOCABULARY.ids["ba"], *"xyé".encode()]
    assert LAB.decode(LAB.encode(" ba xyé tool")) == " ba xyétool"


def test_an_unknown_id_is_an_error():
    with pytest.raises(IndexError):
        LAB.decode([VOCABULARY.size])


def test_a_turn_extends_the_tokens_of_the_turn_before():
    first = [{"role": "user", "content": VOCABULARY.words_for(1, 40)}]
    answer = VOCABULARY.ids_for("answer", 20)
    second = [
        *first,
        {"role": "assistant", "content": LAB.decode(answer)},
        {"role": "user", "content": VOCABULARY.words_for(2, 10)},
    ]
    seen = LAB.encode_chat(first) + answer
    assert LAB.encode_chat(second)[: len(seen)] == seen

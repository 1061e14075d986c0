"""fastokens only where its ids are those of `tokenizers`."""

import json
import sys
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, processors, trainers

from perilune_gateway.request.tokens.encoder import Library, corpus, load, of


@pytest.fixture(scope="module")
def reference():
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user said hi to the assistant"] * 9, trainer)
    return tokenizer


def with_processor(reference, **template):
    tokenizer = HfTokenizer.from_str(reference.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        special_tokens=[("<s>", 0), ("<|im_end|>", 2)], **template
    )
    return tokenizer.to_str()


def test_fastokens_where_ids_are_equal(reference, caplog):
    caplog.set_level("INFO")
    chosen = of(reference.to_str())
    assert (chosen.library, chosen.why) == (Library.FASTOKENS, "")
    assert "tokenizer library=fastokens" in caplog.text
    assert list(chosen.plain("the user said")) == reference.encode("the user said").ids
    assert chosen.cuts.tokens == (b"<s>", b"<|im_start|>", b"<|im_end|>")
    assert of(reference.to_str(), "{{ '<|im_end|>' }}").cuts.tokens[0] == b"<|im_end|>", (
        "the template's first"
    )


def test_equal_files_are_loaded_once_while_they_are_in_use(reference, tmp_path):
    """Pools of one model share what their encoder remembers."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "tokenizer.json").write_text(reference.to_str())
    first, second = map(load, folders)
    assert first is second
    assert load(folders[0], "{{ '<|im_end|>' }}") is not first, "texts of another template are cut elsewhere"
    (folders[1] / "tokenizer.json").write_text(with_processor(reference, single="<s> $A"))
    assert load(folders[1]) is not first


class OtherIds:
    """A fastokens that encodes otherwise."""

    @classmethod
    def from_json_str(cls, text):
        return cls()

    def no_truncation(self):
        pass

    def no_padding(self):
        pass

    def encode_batch_flat(self, prompts, add_special_tokens):
        return [1], None


class Panics(OtherIds):
    def encode_batch_flat(self, prompts, add_special_tokens):
        raise BaseException("panicked at src/lib.rs")


@pytest.mark.parametrize(
    ("fast", "why"),
    [
        pytest.param(SimpleNamespace(Tokenizer=OtherIds), "other ids for '', from token 0", id="other ids"),
        pytest.param(
            SimpleNamespace(Tokenizer=Panics),
            "fails on '': panicked at src/lib.rs",
            id="a panic, which is no Exception",
        ),
    ],
)
def test_a_fastokens_that_differs_or_fails_is_not_used(fast, why, reference, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "fastokens", fast)
    chosen = of(reference.to_str())
    assert (chosen.library, chosen.why) == (Library.TOKENIZERS, why)
    assert f"library=tokenizers why={why}" in caplog.text
    assert list(chosen.plain("the user said")) == reference.encode("the user said").ids


def test_a_missing_fastokens_is_named_as_the_reason(reference, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert of(reference.to_str()).why.startswith("not installed: ")


def test_what_fastokens_cannot_load(reference):
    spec = json.loads(reference.to_str())
    spec["pre_tokenizer"] = {"type": "Punctuation", "behavior": "Isolated"}
    chosen = of(json.dumps(spec))
    if chosen.library is Library.TOKENIZERS:
        assert chosen.why
    text = "it's (the) user, said"
    assert list(chosen.plain(text)) == HfTokenizer.from_str(json.dumps(spec)).encode(text).ids


@pytest.mark.parametrize(
    ("template", "around"),
    [
        pytest.param({"single": "$A"}, ([], []), id="nothing"),
        pytest.param({"single": "<s> $A"}, ([0], []), id="before"),
        pytest.param({"single": "<s> $A <|im_end|>"}, ([0], [2]), id="before and after"),
    ],
)
def test_what_special_tokens_add(template, around, reference):
    chosen = of(with_processor(reference, **template))
    assert tuple(map(list, chosen.around)) == around
    assert list(chosen.special("hi")) == [*around[0], *chosen.plain("hi"), *around[1]]


def test_files_that_truncate_and_pad_do_neither(reference):
    tokenizer = HfTokenizer.from_str(reference.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    chosen = of(tokenizer.to_str())
    assert list(chosen.plain("the user said hi to the assistant")) == (
        reference.encode("the user said hi to the assistant").ids
    )


def test_the_corpus_knows_the_model(reference):
    texts = corpus(json.loads(reference.to_str()))
    assert texts == corpus(json.loads(reference.to_str())), "the same every time"
    assert any("<|im_start|>it's  <|im_start|>\n\n" in text for text in texts)
    assert any("<|im_start|" in text.replace("<|im_start|>", "") for text in texts), "look-alikes"
    assert corpus({}), "no added tokens"


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"model": {"type": "BPE"}}', "\ufeff{}"])
def test_files_that_are_no_tokenizer(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(Exception):  # noqa: B017, PT011 (the library raises plain Exception)
        load(tmp_path)

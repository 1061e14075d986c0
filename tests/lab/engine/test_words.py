"""Generated answers tokenize to the ids that were generated."""

import json

import pytest

from perilune_lab.engine.words import LabText, ModelText, load
from perilune_lab.vocabulary import Vocabulary, write_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "ba be"}, {"type": "text", "text": "bi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "content": "done"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, Vocabulary())
    return folder


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A byte-level BPE with a chat template that strips, as real models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "and",
        "then",
        "sleeps",
        "under",
        "old",
        "trees",
        "near",
        "some",
        "river",
    ]
    corpus = [" ".join(words), *("\n" + word for word in words), *words]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, min_frequency=1)
    tokenizer.train_from_iterator(corpus * 3, trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_the_labs_own_tokenizer_is_recognised_and_equal_to_its_files(folder):
    fast, slow = load(folder), ModelText(folder)
    assert type(load(None)) is type(fast) is LabText
    assert fast.chat(MESSAGES, TOOLS) == slow.chat(MESSAGES, TOOLS)
    assert fast.encode("ba unknown <|im_end|>") == slow.encode("ba unknown <|im_end|>")


def test_an_answer_is_a_function_of_the_prompt_and_grows_at_its_end(folder, bpe_folder):
    for text in (load(None), load(bpe_folder)):
        prompt = text.encode("the quick brown fox")
        assert text.answer(prompt, 50)[:7] == text.answer(prompt, 7)
        assert text.answer(prompt, 50) != text.answer([*prompt, 1], 50)
        assert len(text.answer(prompt, 1)) == 1


def test_a_quoted_answer_tokenizes_to_the_ids_that_were_generated(bpe_folder):
    for text in (load(None), load(bpe_folder)):
        messages = [{"role": "user", "content": "the quick brown fox"}]
        prompt = text.chat(messages, ())
        answer = text.answer(prompt, 40)
        assert "".join(text.pieces(answer)) == text.decode(answer)
        quoted = [*messages, {"role": "assistant", "content": text.decode(answer)}]
        again = text.chat(quoted, ())
        assert again[: len(prompt) + 40] == prompt + answer


@pytest.mark.parametrize("messages", [[{"content": "x"}], [5], [{"role": "user", "content": [{"x": 1}]}]])
def test_messages_of_another_form_raise_what_the_server_catches(messages):
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        load(None).chat(messages, ())


def test_a_folder_without_template_says_so(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no chat template"):
        load(tmp_path)

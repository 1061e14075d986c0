"""Generated answers tokenize to the ids that were generated."""

import json

import pytest

from perilune_lab.engine.inbound import Api, parse
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
    """Return a folder with a byte-level BPE and a chat template that strips, as real models have."""
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


@pytest.fixture(scope="module")
def bos_folder(bpe_folder, tmp_path_factory):
    """Return a folder with a tokenizer that begins texts with <s>, and a template that does so too, as
    Llama's."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    folder = tmp_path_factory.mktemp("bos")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((bpe_folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": {"content": "<s>"}}))
    return folder


@pytest.mark.parametrize(
    ("api", "body", "begins"),
    [
        (Api.CHAT, {"messages": MESSAGES[:1]}, 1),
        (Api.CHAT, {"messages": MESSAGES[:1], "add_special_tokens": True}, 2),
        (Api.RESPONSES, {"input": "ba"}, 2),
        (Api.MESSAGES, {"messages": MESSAGES[:1]}, 1),
        (Api.COMPLETIONS, {"prompt": "ba"}, 1),
        (Api.COMPLETIONS, {"prompt": "ba", "add_special_tokens": False}, 0),
    ],
)
def test_special_tokens_come_where_vllm_adds_them(bos_folder, api: Api, body: dict, begins: int):
    text = ModelText(bos_folder)
    begin = text.encode("")[0]
    assert parse(api, json.dumps(body).encode(), text).prompt.count(begin) == begins


def test_a_tokenizer_with_special_tokens_has_words_to_answer_with(bos_folder):
    text = ModelText(bos_folder)
    answer = text.answer([1, 2, 3], 8)
    assert text.encode(text.decode(answer), False) == answer

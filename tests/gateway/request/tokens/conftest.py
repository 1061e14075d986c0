"""A tokenizer of some 300 tokens, as a folder and loaded."""

import json

import pytest
from token_requests import CHATML
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from perilune_api.pool import Model
from perilune_gateway.request.tokens import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a byte-level BPE of some 300 tokens, ChatML, and <|endoftext|> before a
    completion's prompt."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the user said hi to the assistant and the system said nothing"] * 9, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.enable_truncation(64)  # a file may say so; prompts are never cut
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    return path


@pytest.fixture(scope="module")
def reference(folder):
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture
async def tokenizer(folder):
    """Yield a tokenizer that measures no time, so that only long texts go to a thread, however busy the
    machine is."""
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)), stopwatch=lambda: 0.0)
    yield tokenizer
    await tokenizer.close()

"""What the tokenizer did, as a scrape shows it."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, trainers

from perilune_api.pool import Model
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.metrics import TokenMetrics


def scrape(tokenizer: Tokenizer) -> str:
    registry = CollectorRegistry()
    registry.register(TokenMetrics(tokenizer))
    return generate_latest(registry).decode()


def completion(tokenizer: Tokenizer, text: str) -> None:
    request = parse("/v1/completions", b'{"model": "m", "prompt": "%s"}' % text.encode())
    assert isinstance(request, ParsedRequest)
    assert tokenizer.now(request)


@pytest.fixture
def folder(tmp_path):
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_a_local_tokenizer_counts_its_texts(folder):
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)), stopwatch=lambda: 0.0)
    text = "hello<|im_end|>" * 400
    completion(tokenizer, text)
    completion(tokenizer, text + "hello")
    completion(tokenizer, "hello")
    page = scrape(tokenizer)
    assert 'perilune_tokenizer_info{library="fastokens",why="",why_whole=""} 1.0' in page
    assert 'perilune_tokenized_prompts_total{source="local"} 3.0' in page
    assert 'perilune_encoded_texts_total{known="part"} 1.0' in page
    assert 'perilune_encoded_texts_total{known="short"} 1.0' in page
    assert 'perilune_encoded_texts_total{known="unknown"} 1.0' in page
    assert "perilune_kept_tokens_total 799.0" in page, "all but the last <|im_end|>"
    assert "perilune_encoded_tokens_total 803.0" in page
    assert f"perilune_known_texts_bytes {float(tokenizer.local.held_bytes)}" in page
    await tokenizer.close()


async def test_without_a_local_tokenizer_its_metrics_are_absent():
    tokenizer = Tokenizer(Model(name="m", tokenize="estimate"))
    completion(tokenizer, "hello")
    page = scrape(tokenizer)
    assert 'perilune_tokenized_prompts_total{source="estimate"} 1.0' in page
    assert 'perilune_tokenized_prompts_total{source="engine"} 0.0' in page, "from the start"
    assert 'perilune_tokenizer_passed_on_total{cause="timeout"} 0.0' in page
    assert 'perilune_media_parts_total{named="fetched"} 0.0' in page
    assert "perilune_tokenizer_info" not in page
    await tokenizer.close()


async def test_media_are_counted_by_what_names_them():
    tokenizer = Tokenizer(Model(name="m", tokenize="estimate"))
    tokenizer.media.unplaced(2)
    assert 'perilune_media_parts_total{named="unplaced"} 2.0' in scrape(tokenizer)
    await tokenizer.close()

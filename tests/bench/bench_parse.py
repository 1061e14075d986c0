"""What a 130 KB chat body costs before routing: parse against json.loads of the same run, and each step."""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
from tokenizers import Tokenizer as HfTokenizer

from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest
from perilune_gateway.request.tokens import chat_template
from perilune_gateway.request.tokens.conversation import read
from perilune_lab.vocabulary import Vocabulary, write_tokenizer

PATH = "/v1/chat/completions"


def best_us(step: Callable[[], object], rounds: int) -> float:
    """Microseconds of the fastest of some rounds."""
    times = []
    for _ in range(rounds):
        started = perf_counter()
        step()
        times.append(perf_counter() - started)
    return min(times) * 1e6


@pytest.mark.bench
def test_parse(tmp_path: Path) -> None:
    vocabulary = Vocabulary()
    write_tokenizer(tmp_path, vocabulary)
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": vocabulary.words_for(i, 560)} for i in range(60)
    ]

    body = json.dumps({"model": "m", "stream": True, "session_id": "s", "messages": turns}).encode()
    request = parse(PATH, body)
    templates = chat_template.load(tmp_path)
    assert isinstance(request, ParsedRequest)
    chat, api = request.prompt, request.api
    assert isinstance(chat, ChatPrompt)
    assert templates is not None
    template = templates.default
    conversation = read(api, chat)
    text = template.render(conversation)
    tokenizer = HfTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    n_tokens = len(tokenizer.encode(text))
    loads_us = best_us(lambda: json.loads(body), 50)
    steps_us = {
        "parse": best_us(lambda: parse(PATH, body), 200),
        "prefix text": best_us(request.prefix_text, 200),
        "conversation": best_us(lambda: read(api, chat), 50),
        "template": best_us(lambda: template.render(conversation), 50),
        "encode": best_us(lambda: tokenizer.encode_batch_fast([text])[0].ids, 5),
    }

    print(f"\n{len(body):,} bytes, {len(turns)} messages, {n_tokens:,} tokens (generated vocabulary)")
    for name, us in steps_us.items():
        print(f"{name:>14} {us:10.1f} µs")
    print(f"{'json.loads':>14} {loads_us:10.1f} µs = {loads_us / steps_us['parse']:.1f} × parse")
    assert loads_us > 2 * steps_us["parse"]

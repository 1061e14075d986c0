"""An engine's pages about tokens, answered by a tokenizer and a chat template of its own."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from perilune_api.pool import Model
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.tokens import Tokenizer

WORDS = "the user said hi to the assistant and the system said nothing"


def folder_with(path: Path, template: str, words: str = WORDS) -> Path:
    """Return the folder after a tokenizer that was trained with `words`, and the template, were written."""
    (path / "tokenizer.json").write_text(_trained(words))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@cache
def _trained(words: str) -> str:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[
            *(["<|more|>"] if words != WORDS else []),
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words] * 9, trainer)
    return tokenizer.to_str()


class RenderingEngine:
    """`post` is asked like an engine: /tokenize, /v1/messages/count_tokens, /v1/…/render if it renders."""

    def __init__(self, folder: Path, *, renders: bool = False) -> None:
        self._tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)))
        self._renders = renders
        self.asked: list[str] = []
        """The paths of all questions."""
        self.more_counted = 0
        """Tokens by which count_tokens is more than it renders."""
        self.answer = self._answer

    async def post(self, path: str, body: bytes, most: int) -> bytes | None:
        self.asked.append(path)
        return await self.answer(path, body, most)

    async def _answer(self, path: str, body: bytes, most: int) -> bytes | None:
        if path.endswith("/render"):
            ids = self._ids(path.removesuffix("/render"), body) if self._renders else None
            return None if ids is None else json.dumps({"token_ids": ids}).encode()
        if path == "/tokenize":
            chat = "messages" in json.loads(body)
            ids = self._ids("/v1/chat/completions" if chat else "/v1/completions", body)
            return None if ids is None else json.dumps({"tokens": ids, "count": len(ids)}).encode()
        ids = self._ids(path.removesuffix("/count_tokens"), body)
        if ids is None:
            return None
        count: Any = {"input_tokens": len(ids) + self.more_counted}
        return json.dumps({"usage": count, **count}).encode()

    def _ids(self, path: str, body: bytes) -> list[int] | None:
        request = parse(path, body)
        assert isinstance(request, ParsedRequest), request
        ids = self._tokenizer.local_ids(request)
        return None if ids is None else list(ids)

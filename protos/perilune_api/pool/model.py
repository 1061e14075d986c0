"""`spec.model`: the model that the pool serves, and how the gateway counts its tokens."""

from typing import Annotated, Literal

from msgspec import Meta

from perilune_api.fields import Name, Positive, Struct

LONGEST_CONTEXT = 1_048_576
"""Tokens of the longest context of any model that is served today."""


class Lora(Struct, frozen=True):
    """A LoRA adapter that the engines serve in addition to the model."""

    name: Name
    """Value of `model` in a request that uses this adapter."""
    path: str = ""
    """Path of the adapter as vLLM loads it. vLLM's block hashes include it."""


class Model(Struct, frozen=True, kw_only=True):
    """The model that the pool serves, and how the gateway counts its tokens."""

    name: Annotated[str, Meta(max_length=253)] = ""
    """Value of `model` in a request for this model. May be left out with `engine.selector`, because the
    engines tell it. Otherwise required."""
    aliases: tuple[Name, ...] = ()
    """Other values of `model` that also mean this model."""
    loras: tuple[Lora, ...] = ()
    """LoRA adapters that the engines serve in addition to the model."""
    tokenizer: str = ""
    """Folder in the gateway's file system with tokenizer.json and the chat template; on Kubernetes,
    gateway.podTemplate mounts it. If empty, the gateway has no local tokenizer (see `tokenize`)."""
    tokenize: Literal["auto", "local", "engine", "estimate"] = "auto"
    """How the gateway tokenizes prompts. local: with `tokenizer`. engine: through the engine's /tokenize.
    estimate: by `bytesPerToken`. auto: local if `tokenizer` is set, else engine, and estimate where that
    fails."""
    bytes_per_token: Annotated[float, Meta(gt=0)] = 4.0
    """Bytes of text per token, for the first estimate of a session. Later estimates use the ratio that the
    engine reported for that session."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of tokens of a prompt and its answer together. On Kubernetes the engines get it as
    `--max-model-len`. With 0 the engines decide: they allow what the model does, or less if their memory does
    not suffice, and the gateway refuses no prompt as too long."""
    kv_bytes_per_token: Positive = 98_304
    """Bytes that one token takes in the KV cache, summed over all layers."""

    @property
    def longest_context(self) -> int:
        """Tokens beyond which no prompt need be looked at."""
        return self.context_tokens or LONGEST_CONTEXT

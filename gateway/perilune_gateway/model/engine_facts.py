"""What an engine that others run says about itself: the answers of its pages, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name at /v1/models."""

    id: str
    parent: str = ""
    """The model whose adapter it is. Empty if it is none."""
    root: str = ""
    """Where the engine has it from: of an adapter, its path."""
    context_tokens: int = 0
    """Most tokens of a prompt and its answer. 0 if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What one engine tells."""

    trouble: str = ""
    """Why it does not answer /v1/models; empty when it does."""
    models: tuple[ServedModel, ...] = ()
    version: str = ""
    """Empty: not told."""
    has_metrics: bool = False
    """Whether /metrics has vLLM's series."""
    block_size: int = 0
    """Tokens per KV block. 0 if it does not say."""
    kv_tokens: int = 0
    """Tokens that fit into its KV cache. 0 if it does not say."""
    prefix_caching: bool | None = None
    """None: not told."""
    hash_algorithm: str = ""
    """Empty: not told."""
    asleep: bool = False
    connector: str = ""
    """The KV connector that its metrics show. Empty if they show none."""
    events: tuple[str, ...] | None = None
    """Where it publishes KV events, one address for each rank, as it was told; None: it has no page that
    says so (/kv_event_sources)."""
    replay: tuple[str, ...] = ()
    first_rank: int = 0
    """Number of the first of these ranks; that of a server with a part of its engine's ranks may be above
    0."""

    @property
    def model(self) -> ServedModel | None:
        """The first model that is no adapter."""
        return next((model for model in self.models if not model.parent), None)

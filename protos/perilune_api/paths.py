"""The paths that clients may ask a pool for. All others are refused, because an engine may generate there
uncounted, unsalted and with a priority of the client's choice, or describe itself alone.

Routes (the operator's, `perilune envoy`) and the gateway use the same lists, so the list also holds while no
gateway runs.
"""

from collections.abc import Sequence

GENERATING: Sequence[str] = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/responses/compact",
)
POOLING: Sequence[str] = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
)
"""What reads prompts and generates nothing."""
COUNTING: Sequence[str] = (
    "/v1/responses/input_tokens",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/tokenize",
    "/detokenize",
)
"""What describes a prompt without the model's work; any endpoint of the model can answer."""
MODELS, RESPONSES = "/v1/models", "/v1/responses"
"""The list of models, and stored responses; both also with the name of one."""
PAGES: Sequence[str] = ("/health", "/ping", "/version")
SUPPORTED: Sequence[str] = (*GENERATING, *POOLING, *COUNTING, MODELS, f"{RESPONSES}/ID", *PAGES)
"""As clients are told."""
EXACT: Sequence[str] = (*GENERATING, *POOLING, *COUNTING, *PAGES)
PREFIXES: Sequence[str] = (MODELS, RESPONSES)
"""Paths that are supported with all that follows them after a slash."""

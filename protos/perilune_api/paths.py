"""The paths that clients may ask a pool for. All others are refused, because an engine may generate there
uncounted, unsalted and with a priority of the client's choice, or describe itself alone.

Routes (the operator's, `perilune envoy`) and the gateway use the same lists, so the list also holds while no
gateway runs.
"""

import json
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
REFUSED: Sequence[str] = ("/v1", "/v2", "/inference", "/invocations", "/generative_scoring", "/metrics")
"""Paths of engines below which clients look for more than is supported. Routes answer `refusal` there."""


def refusal(supported: Sequence[str] = SUPPORTED) -> str:
    """Return the body of a route's 404, in the form of OpenAI's errors."""
    message = f"This path is not supported. Supported are {', '.join(supported)}"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
    return json.dumps({"error": error})

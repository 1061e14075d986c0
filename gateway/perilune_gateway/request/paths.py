"""What a request is for, by its path: a model's API, a stored response, the list of models, an engine's page.

`perilune_api.paths` lists what is supported. The query string is ignored, and escapes such as `%73` are
decoded, as engines decode them.
"""

from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import unquote

from perilune_api.paths import EXACT, MODELS, POOLING, PREFIXES, RESPONSES


class Api(StrEnum):
    """The API of a request. It decides what the body means and which form a refusal has."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    POOLING = "pooling"
    """Embeddings, rerank, score, classify: prompts are read, and nothing is generated."""


PATHS: Mapping[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/v1/responses/compact": Api.RESPONSES,
    **dict.fromkeys(POOLING, Api.POOLING),
}
_EXACT = frozenset(EXACT)
ENGINE_PAGES = frozenset({"/metrics", "/load", "/kv_event_sources", "/server_info", "/is_sleeping"})
"""Pages on which an engine describes itself; from a pool the answer would be any engine's."""


def is_model_path(path: str) -> bool:
    """Return whether a POST to this path is a request for the model."""
    return api_of(path) is not None


def response_of(path: str) -> str:
    """Return the id of the stored response that a path names, such as /v1/responses/ID/cancel; else empty."""
    bare = _bare(path)
    if bare in _EXACT or not bare.startswith(f"{RESPONSES}/"):
        return ""
    return bare.removeprefix(f"{RESPONSES}/").partition("/")[0]


def is_supported(path: str) -> bool:
    """Return whether clients may ask for the path."""
    bare = _bare(path)
    return bare in _EXACT or any(bare == known or bare.startswith(f"{known}/") for known in PREFIXES)


def answers_with_id(path: str) -> bool:
    """Return whether the answer is a response with an id that the request may choose."""
    return _bare(path) == RESPONSES


def is_engine_page(path: str) -> bool:
    """Return whether the page describes one engine."""
    return _bare(path) in ENGINE_PAGES


def api_of(path: str) -> Api | None:
    """Return the API of a path, or None when it is no model path."""
    return PATHS.get(_bare(path))


def operation(path: str) -> str:
    """Return what a request of this path asks for, as OpenTelemetry's conventions for GenAI name it; the last
    word of a listed path for which they have no name; empty for any other path."""
    match api_of(path):
        case None:
            return ""
        case Api.COMPLETIONS:
            return "text_completion"
        case Api.POOLING:
            return _bare(path).rpartition("/")[2]
        case _:
            return "chat"


def _bare(path: str) -> str:
    bare = path.partition("?")[0]
    return unquote(bare) if "%" in bare else bare


def listed(path: str) -> str | None:
    """Return the model whose entry a GET of this path asks for; empty for the list of all models, None for
    any other page."""
    bare = _bare(path)
    if bare == MODELS:
        return ""
    return bare[len(MODELS) + 1 :] if bare.startswith(f"{MODELS}/") else None

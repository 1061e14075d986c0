"""The JSON bodies of refusals, in the form of the API that was asked, and the refusal of bodies that are too
large."""

import msgspec

from perilune_gateway.model import Refusal, RefuseReason
from perilune_gateway.request.paths import Api, api_of

_OPENAI_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}
_ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_ABOUT_MODEL = (RefuseReason.NO_MODEL, RefuseReason.UNKNOWN_MODEL)


def too_large(limit_bytes: int) -> Refusal:
    """Return the refusal of a body with more bytes, whoever finds that."""
    message = f"The request's body has more than {limit_bytes} bytes, the limit (routing.limits.maxBodyBytes)"
    return Refusal(RefuseReason.BODY_TOO_LARGE, message)


def error_body(status: int, reason: RefuseReason, message: str, path: str = "") -> bytes:
    """Return the JSON body of a refusal: in Anthropic's form for /v1/messages, else in OpenAI's, whose `code`
    is the RefuseReason."""
    error: dict[str, str | None]
    if api_of(path) is Api.MESSAGES:
        error = {"type": _ANTHROPIC_TYPES.get(status, "invalid_request_error"), "message": message}
        return msgspec.json.encode({"type": "error", "error": error})
    error = {
        "message": message,
        "type": _OPENAI_TYPES.get(status, "invalid_request_error"),
        "param": "model" if reason in _ABOUT_MODEL else None,
        "code": reason.value,
    }
    return msgspec.json.encode({"error": error})

"""The bodies of refusals."""

import json

import pytest

from perilune_gateway.model import RefuseReason
from perilune_gateway.request.refusal_body import error_body


@pytest.mark.parametrize(
    ("status", "reason", "path", "body"),
    [
        pytest.param(
            404,
            RefuseReason.UNKNOWN_MODEL,
            "/v1/chat/completions",
            {
                "error": {
                    "message": "é",
                    "type": "invalid_request_error",
                    "param": "model",
                    "code": "unknown_model",
                }
            },
            id="OpenAI, unknown model",
        ),
        pytest.param(
            429,
            RefuseReason.OVERLOADED,
            "",
            {"error": {"message": "é", "type": "rate_limit_error", "param": None, "code": "overloaded"}},
            id="OpenAI, overloaded",
        ),
        pytest.param(
            503,
            RefuseReason.NO_ENDPOINT,
            "/v1/messages?beta=true",
            {"type": "error", "error": {"type": "overloaded_error", "message": "é"}},
            id="Anthropic, no endpoint",
        ),
        pytest.param(
            400,
            RefuseReason.BAD_JSON,
            "/v1/messages",
            {"type": "error", "error": {"type": "invalid_request_error", "message": "é"}},
            id="Anthropic, bad JSON",
        ),
    ],
)
def test_an_error_has_the_form_of_the_api_that_was_called(status, reason, path, body):
    assert json.loads(error_body(status, reason, "é", path)) == body

"""What a request is for, by its path."""

import pytest

from perilune_api.paths import SUPPORTED
from perilune_gateway.request.paths import (
    PATHS,
    is_engine_page,
    is_model_path,
    is_supported,
    listed,
    response_of,
)

CHAT, COMPLETIONS, RESPONSES, MESSAGES, *_ = PATHS


@pytest.mark.parametrize(
    ("path", "yes"),
    [
        pytest.param(CHAT, True, id="chat"),
        pytest.param(COMPLETIONS, True, id="completions"),
        pytest.param(RESPONSES, True, id="responses"),
        pytest.param(MESSAGES, True, id="messages"),
        pytest.param(CHAT + "?beta=true&x=/", True, id="query string ignored"),
        pytest.param(MESSAGES + "?", True, id="empty query string"),
        pytest.param("/v1/chat/completion%73", True, id="an escape is decoded as the engine decodes it"),
        pytest.param("/v1/%63ompletions?x=%2F", True, id="an escape before a query string"),
        pytest.param("/v1/chat/completion%2573", False, id="an escaped escape"),
        pytest.param("/v1/models", False, id="models"),
        pytest.param("/v1/chat/completions/render", False, id="longer path"),
        pytest.param("/v1/messages/count_tokens", False, id="count_tokens"),
        pytest.param("/x?/v1/completions", False, id="path inside a query string"),
        pytest.param("", False, id="empty"),
    ],
)
def test_only_some_paths_are_for_the_model(path, yes):
    assert is_model_path(path) is yes


@pytest.mark.parametrize(
    ("path", "response_id"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel?x=1", "resp_1"),
        ("/v1/responses/input_tokens", ""),
        ("/v1/responses/compact", ""),
        ("/x/v1/responses/resp_1", ""),
        ("/v1/responses", ""),
        ("/v1/completions", ""),
    ],
)
def test_a_path_names_a_stored_response(path: str, response_id: str):
    assert response_of(path) == response_id


@pytest.mark.parametrize(
    ("path", "model"),
    [("/v1/models", ""), ("/v1/models/org/m", "org/m"), ("/v1/modelsx", None), ("/v1/completions", None)],
)
def test_a_path_asks_for_the_list_of_models_or_one_of_them(path: str, model: str | None):
    assert listed(path) == model


@pytest.mark.parametrize(
    ("path", "yes"),
    [
        *((path, True) for path in SUPPORTED),
        ("/v1/models/org/m", True),
        ("/v1/responses/resp_1/cancel?x=1", True),
        ("/v1/chat/completions/batch", False),
        ("/v1/audio/transcriptions", False),
        ("/inference/v1/generate", False),
        ("/invocations", False),
        ("/v1/load_lora_adapter", False),
        ("/v1/completions/", False),
        ("//v1/completions", False),
        ("/v1/chat/completions%2Fbatch", False),
        ("/sleep", False),
        ("/v1/modelsx", False),
        ("/", False),
    ],
)
def test_only_listed_paths_are_supported(path: str, yes: bool):
    assert is_supported(path) is yes


def test_a_page_of_one_engine_is_known_by_its_path():
    assert is_engine_page("/metrics?name=x")
    assert not is_engine_page("/health")

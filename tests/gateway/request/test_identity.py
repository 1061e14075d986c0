"""A request says by header, cookie or body which session it belongs to."""

import pytest

from perilune_api.pool import SessionKeys
from perilune_gateway.model import SessionKey
from perilune_gateway.request.identity import MAX_ID, from_headers, inferred, with_body

KEYS = SessionKeys()


@pytest.mark.parametrize(
    ("headers", "session_id", "parent_id"),
    [
        pytest.param({}, "", "", id="nothing told"),
        pytest.param({"x-session-id": "s"}, "s", "", id="generic"),
        pytest.param({"thread-id": "t"}, "t", "", id="codex"),
        pytest.param({"session_id": "t"}, "t", "", id="codex, older"),
        pytest.param({"x-smg-routing-key": "k"}, "k", "", id="routing key"),
        pytest.param({"x-session-id": "s", "x-dynamo-session-id": "d"}, "d", "", id="dynamo wins"),
        pytest.param({"x-claude-code-session-id": "c"}, "c", "", id="claude code"),
        pytest.param(
            {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, "c/a", "c", id="sub-agent"
        ),
        pytest.param(
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "p",
            },
            "c/a",
            "c/p",
            id="sub-agent of a sub-agent",
        ),
        pytest.param({"x-session-id": "s", "x-parent-session-id": "p"}, "s", "p", id="parent"),
        pytest.param({"conversation_id": "t"}, "t", "", id="codex, conversation"),
        pytest.param({"thread-id": "t", "x-codex-parent-thread-id": "p"}, "t", "p", id="codex, sub-agent"),
        pytest.param(
            {"x-session-affinity": "s", "x-session-id": "all", "x-parent-session-id": "p"},
            "s",
            "p",
            id="opencode, whose x-session-id may be a cache key",
        ),
        pytest.param(
            {"x-opencode-session": "s", "x-opencode-parent-session": "p"}, "s", "p", id="opencode's own"
        ),
    ],
)
def test_the_usual_headers_name_the_session(headers: dict[str, str], session_id: str, parent_id: str) -> None:
    identity = from_headers(headers, KEYS)
    assert (identity.session_id, identity.parent_id) == (session_id, parent_id)


def test_the_pools_header_comes_first() -> None:
    keys = SessionKeys(headers=("X-Conversation",))
    assert from_headers({"x-conversation": "mine", "x-session-id": "s"}, keys).session_id == "mine"


def test_a_cookie_names_the_session_where_configured() -> None:
    headers = {"cookie": "a=1; sid=abc"}
    assert from_headers(headers, KEYS).session_id == ""
    assert from_headers(headers, SessionKeys(cookie="sid")).session_id == "abc"
    assert from_headers({"cookie": "\x00;;=;"}, SessionKeys(cookie="sid")).session_id == ""


@pytest.mark.parametrize("other", ['a[b]={"x": [1, 2]}', "a b", 'a="' + "\\" * 1_000_000 + '"'])
def test_other_cookies_whatever_they_contain_hide_and_delay_nothing(other: str) -> None:
    headers = {"cookie": f'{other}; sid="abc"'}
    assert from_headers(headers, SessionKeys(cookie="sid")).session_id == "abc"


def test_two_users_with_one_session_id_are_two_sessions() -> None:
    alice = from_headers({"authorization": "Bearer a", "x-session-id": "s"}, KEYS)
    mallory = from_headers({"authorization": "Bearer m", "x-session-id": "s"}, KEYS)
    assert alice.key != mallory.key
    assert "Bearer" not in alice.tenant


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
def test_whatever_a_client_authenticates_with_separates_tenants(name: str) -> None:
    tenants = {from_headers({name: key, "x-session-id": "s"}, KEYS).tenant for key in ("a", "b", "")}
    assert len(tenants) == 3


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("authorization", ("x-api-key", "api-key")),
        ("x-api-key", ("api-key",)),
    ],
)
def test_further_credentials_make_no_other_tenant(first: str, others: tuple[str, ...]) -> None:
    given = {first: "real"}
    tenants = {from_headers(given | {name: str(i)}, KEYS).tenant for name in others for i in range(3)}
    assert tenants == {from_headers(given, KEYS).tenant}


def test_an_empty_credential_is_none() -> None:
    headers = {"authorization": "", "x-api-key": "a"}
    assert from_headers(headers, KEYS).tenant == from_headers({"x-api-key": "a"}, KEYS).tenant


def test_a_client_cannot_name_an_inferred_session() -> None:
    key = inferred(from_headers({}, KEYS), "").key
    assert key is not None
    assert inferred(from_headers({}, KEYS), "").key != key, "random"
    assert from_headers({"x-session-id": key.session_id}, KEYS).key != key
    assert with_body(from_headers({}, KEYS), key.session_id, "", KEYS).key != key


def test_tenant_header_replaces_authorization() -> None:
    keys = SessionKeys(tenant_header="X-Org")
    headers = {"authorization": "Bearer a", "x-org": "acme", "x-session-id": "s"}
    assert from_headers(headers, keys).key == SessionKey("acme", "s")


def test_huge_ids_are_bounded() -> None:
    assert len(from_headers({"x-session-id": "s" * 10_000}, KEYS).session_id) < MAX_ID


def test_a_header_marks_the_final_turn() -> None:
    assert from_headers({"x-dynamo-session-final": "true"}, KEYS).final
    assert not from_headers({"x-dynamo-session-final": "no"}, KEYS).final


def test_body_counts_only_where_headers_are_silent() -> None:
    silent = from_headers({}, KEYS)
    told = from_headers({"x-session-id": "h"}, KEYS)
    assert with_body(told, "b", "", KEYS).session_id == "h"
    assert with_body(silent, "b", "u", KEYS).session_id == "b"
    assert with_body(silent, "", "u", KEYS).session_id == ""
    assert with_body(silent, "", "u", SessionKeys(body_user=True)).session_id == "u"

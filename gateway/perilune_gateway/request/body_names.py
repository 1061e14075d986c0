"""The names that a body gives to its session and its user, for which APIs and clients have various places."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.request.bodies import Body, Responses
from perilune_gateway.request.paths import Api


class _ClaudeCodeUser(Struct, frozen=True):
    session_id: str = ""


_CLAUDE_CODE_USER = re.compile(r"user_[0-9a-zA-Z]+_account_[0-9a-f-]*_session_([0-9a-f-]+)")


def session_of(api: Api, fields: Body) -> str:
    """Return the session that the body names: `session_id`, else `vllm_xargs.session_id`, else
    `metadata.session_id`, else the session that Claude Code writes into `metadata.user_id`, or the
    `conversation` of OpenAI's Responses."""
    metadata = objects(fields.metadata)
    return (
        text(fields.session_id)
        or text(objects(fields.vllm_xargs).get("session_id"))
        or text(metadata.get("session_id"))
        or (_claude_code_session(text(metadata.get("user_id"))) if api is Api.MESSAGES else "")
        or (_conversation(fields.conversation) if isinstance(fields, Responses) else "")
    )


def user_of(api: Api, fields: Body) -> str:
    """Return the user that the body names: `user`; Anthropic: `metadata.user_id`."""
    user = name(fields.user)
    return user or (text(objects(fields.metadata).get("user_id")) if api is Api.MESSAGES else "")


def _conversation(given: Any) -> str:
    """Return the id of a conversation, which is given by its id or as an object."""
    return text(given) or text(objects(given).get("id"))


def _claude_code_session(user_id: str) -> str:
    """Return the session in a `user_id` of Claude Code, in the form of either its older or its newer
    versions; empty in all others."""
    if user_id.startswith("{"):
        try:
            return msgspec.json.decode(user_id, type=_ClaudeCodeUser).session_id
        except UNREADABLE:
            return ""
    found = _CLAUDE_CODE_USER.fullmatch(user_id)
    return found[1] if found else ""


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def name(value: object) -> str:
    """Return a text, or the digits of a number; else an empty string."""
    return str(value) if type(value) is int and abs(value) < 2**64 else text(value)


def objects(value: Any) -> Mapping[str, Any]:
    """Return an object, or an empty one in place of all else."""
    return value if isinstance(value, dict) else {}

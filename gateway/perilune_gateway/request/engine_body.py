"""Writes into a request's body what its engine has to be told: fields of ours, and the transfer of its KV."""

from typing import Any

import msgspec
from msgspec import Struct

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model import NO_FIELDS, EngineFields
from perilune_gateway.request.openai import BYTE_ORDER_MARK


def for_engine(body: bytes, added: EngineFields) -> bytes | None:
    """Add fields for the engine to a body that `openai.parse` has accepted; None if there are none to add.

    The client's own `vllm_xargs` are kept. Fields are written at the end, because engines take the last of
    two equal names. Costs one copy of the body.
    """
    if added == NO_FIELDS:
        return None
    fields: dict[str, object] = {}
    if added.priority is not None:
        fields["priority"] = added.priority
    if added.cache_salt:
        fields["cache_salt"] = added.cache_salt
    if added.request_id:
        fields["request_id"] = added.request_id
    if added.full_report and (own := _own_xargs(body)) is not None:
        fields["vllm_xargs"] = {"kv_cache_report_mode": "full", **own}
    if not fields:
        return None
    end = body.rindex(b"}")
    return b"".join((body[:end], b",", msgspec.json.encode(fields)[1:-1], body[end:]))


_UNWANTED = (
    *("stop", "stop_token_ids", "min_tokens", "response_format", "structured_outputs", "stream_options"),
    *("max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids"),
)
"""Fields of a request's answer, which a prefill for another endpoint does without."""


def prefill_body(body: bytes, transfer_id: str) -> bytes:
    """Return the body that has a request's prompt prefilled for another engine: the client's own, but for an
    answer of one token that ends by its length, because the engine drops the KV of one that ends otherwise.
    Raises one of UNREADABLE, since only a part of the body was read before."""
    fields = msgspec.json.decode(body.removeprefix(BYTE_ORDER_MARK), type=dict[str, Any])
    for name in _UNWANTED:
        fields.pop(name, None)
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    answer = {"max_tokens": 1, "ignore_eos": True, "stream": True}
    return msgspec.json.encode({**fields, **answer, "kv_transfer_params": params})


def with_transfer(body: bytes, params: bytes) -> bytes:
    """Add transfer parameters (JSON) to a body that `openai.parse` has accepted, see `for_engine`."""
    end = body.rindex(b"}")
    return b'%b,"kv_transfer_params":%b%b' % (body[:end], params, body[end:])


class _OwnXargs(Struct, frozen=True):
    vllm_xargs: dict[str, Any] | None = None


def _own_xargs(body: bytes) -> dict[str, Any] | None:
    """Return the client's `vllm_xargs`; None if the engine will refuse them."""
    try:
        return msgspec.json.decode(body.removeprefix(BYTE_ORDER_MARK), type=_OwnXargs).vllm_xargs or {}
    except UNREADABLE:
        return None

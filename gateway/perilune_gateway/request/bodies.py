"""The fields of five APIs' bodies that routing reads, as decoders, which skip all other fields.

All fields are optional, since clients send null for "not set".
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

NOT_CUT = "disabled"
"""The `truncation` of Responses whose prompts stay whole; with null, engines cut them."""


class Body(Struct, frozen=True, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    priority: int | None = None
    # Any: vLLM ignores some of these in some APIs, and so takes any value.
    session_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    cache_salt: Any = None
    vllm_xargs: Any = None
    metadata: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class WithMedia(Body, frozen=True, kw_only=True):
    mm_processor_kwargs: Raw = Raw()
    media_io_kwargs: Raw = Raw()


class Chat(WithMedia, frozen=True, kw_only=True):
    messages: Raw = Raw()
    tools: Raw = Raw()
    documents: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    chat_template: str | None = None
    reasoning_effort: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


class Completions(Body, frozen=True, kw_only=True):
    prompt: Raw = Raw()
    prompt_embeds: Raw = Raw()
    max_tokens: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


class Effort(Struct, frozen=True):
    effort: str | None = None


class Thinking(Struct, frozen=True):
    type: str | None = None


class Responses(WithMedia, frozen=True, kw_only=True):
    input: Raw = Raw()
    instructions: Raw = Raw()
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    reasoning: Effort | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    request_id: Any = None
    max_output_tokens: int | None = None
    truncation: str | None = NOT_CUT
    store: Any = True


class Messages(WithMedia, frozen=True, kw_only=True):
    messages: Raw = Raw()
    system: Raw = Raw()
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    max_tokens: int | None = None
    thinking: Thinking | None = None
    output_config: Effort | None = None


class Pooling(Body, frozen=True, kw_only=True):
    input: Raw = Raw()
    messages: Raw = Raw()
    query: Raw = Raw()
    queries: Raw = Raw()
    documents: Raw = Raw()
    items: Raw = Raw()
    text_1: Raw = Raw()
    text_2: Raw = Raw()
    data_1: Raw = Raw()
    data_2: Raw = Raw()


CHAT = msgspec.json.Decoder(Chat, strict=False)
COMPLETIONS = msgspec.json.Decoder(Completions, strict=False)
RESPONSES = msgspec.json.Decoder(Responses, strict=False)
MESSAGES = msgspec.json.Decoder(Messages, strict=False)
POOLING = msgspec.json.Decoder(Pooling, strict=False)

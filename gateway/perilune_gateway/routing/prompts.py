"""Makes a prompt of a parsed body: its tokens, its KV blocks, and what else of the body counts.

request ─▶ `tokens`, now or later ─▶ `of`: hashes of its blocks, by adapter and salt ─▶ Prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from perilune_api.pool import Pool, Role
from perilune_gateway.model import RequestHead, Tokens, TokenSource, Unsplit
from perilune_gateway.request import block_hashes, paths
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.request.identity import bounded
from perilune_gateway.request.media import digested, may_have_media
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest, has_tools, keeps_lead, lead
from perilune_gateway.request.tokens.media_spans import extra_keys
from perilune_gateway.request.tokens.prompts import MEDIA_TOKENS
from perilune_gateway.routing.context import Prompt
from perilune_gateway.state.pool_state import PoolState

PromptSeen = Callable[[Sequence[int], Sequence[int], str, str, float], object]
"""Takes (token ids, blocks, adapter, salt, now) of a prompt."""


class TokenizesNow(Protocol):
    """The part of request.tokens.Tokenizer that the router uses."""

    @property
    def rewrites_answers(self) -> bool:
        """Whether the chat template may write an answer into the next prompt otherwise than an engine
        generated it."""

    def now(self, request: ParsedRequest) -> Tokens | None:
        """Return the tokens, or None if tokenizing has to wait for a thread or an engine."""


class Prompts:
    """The prompts of one pool's requests."""

    def __init__(
        self,
        state: PoolState,
        tokenizer: TokenizesNow,
        aliases: Aliases,
        prompt_seen: PromptSeen | None = None,
    ) -> None:
        """`prompt_seen`: is called with each prompt whose token ids are known, before its blocks are looked
        up."""
        self._state = state
        self._tokenizer = tokenizer
        self._aliases = aliases
        self._prompt_seen = prompt_seen
        self._chains = block_hashes.Chains()

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        spec = pool.spec
        self._model = spec.model
        self._block_size = spec.engine.block_size
        self._loras = {lora.name for lora in spec.model.loras}
        self._salts = spec.routing.cache_salt == "tenant"
        self._splits = any(endpoint.role is Role.PREFILL for endpoint in spec.endpoints)

    def rewrites_answers(self, api: paths.Api | None) -> bool:
        """Return whether the next prompt of a conversation may have its answers otherwise than an engine
        generated them. A completion's prompt is what the client writes."""
        return api in (paths.Api.CHAT, paths.Api.MESSAGES) and self._tokenizer.rewrites_answers

    def continued(self, request: ParsedRequest, tenant: str) -> ParsedRequest:
        """Return a request that names an earlier response with the turns before it, as far as they are known
        and the tenant's."""
        if not self._aliases.stored(tenant, request.previous_response_id):
            return request
        return replace(request, earlier=self._state.stored.before(request.previous_response_id))

    def routed(self, request: ParsedRequest, response_id: str, server: str) -> None:
        """Record that the request was routed to `server`, which stores its conversation if it stores any."""
        self._state.stored.keep(response_id, request, server)

    def tokens(self, request: ParsedRequest) -> Tokens | None:
        """Return the prompt's tokens, or None if a thread or an engine has to count them."""
        return self._tokenizer.now(request)

    def of(
        self,
        head: RequestHead,
        request: ParsedRequest,
        tokens: Tokens,
        *,
        tenant: str,
        body_bytes: int,
        now: float,
    ) -> Prompt:
        """Return the prompt of a request with these tokens."""
        lora = request.model if request.model in self._loras else ""
        pooling = request.api is paths.Api.POOLING
        salt = ""
        if self._salts:
            salt = self._aliases.cache_salt(tenant, request.cache_salt)
            request = replace(request, cache_salt=salt)
        chained, stores = bool(request.previous_response_id), request.api is paths.Api.RESPONSES
        partial = chained and tokens.ids is None
        prompt = Prompt(
            tokens=tokens.count,
            source=tokens.source,
            blocks=() if pooling or partial else self._hash_blocks(request, tokens, lora, now),
            model=request.model,
            output_tokens=request.max_output_tokens,
            priority=request.priority,
            body_bytes=body_bytes,
            cache_key=bounded(request.prompt_cache_key),
            cache_salt=salt,
            chained=chained,
            partial=partial,
            names_response=paths.answers_with_id(head.path) and not request.request_id,
            unsplit=self._unsplit(request),
            lead=lead(request) if stores else 0,
            keeps_lead=not stores or keeps_lead(request),
            rewritten=self._tokenizer.rewrites_answers or (chained and has_tools(request)),
        )
        is_text = tokens.source is not TokenSource.ESTIMATE and not tokens.media
        if self._prompt_seen and tokens.ids is not None and is_text and not pooling:
            self._prompt_seen(tokens.ids, prompt.blocks, lora, request.cache_salt, now)
        return prompt

    def _hash_blocks(self, request: ParsedRequest, tokens: Tokens, lora: str, now: float) -> Sequence[int]:
        """Return our hashes of the prompt's full blocks; of its text if its token ids are not known."""
        root = block_hashes.prefix_root(lora, request.cache_salt)
        if tokens.ids is not None and tokens.source is not TokenSource.ESTIMATE and not tokens.media:
            return self._chains.tokens(tokens.ids, self._block_size, root)
        if tokens.ids is not None:
            extra = extra_keys(tokens.media, len(tokens.ids) // self._block_size, self._block_size)
            blocks = block_hashes.chain(tokens.ids, self._block_size, root, extra)
            if tokens.awaited is not None:
                self._state.media.expect(root, blocks, tokens.ids, tokens.awaited, now)
            if tokens.media or self._state.media.learns or request.earlier:
                return blocks
        model = self._model
        text = digested(request.prefix_text(), int(MEDIA_TOKENS * model.bytes_per_token))
        text = text[: int(model.longest_context * model.bytes_per_token)]
        return self._chains.text(text, int(self._block_size * model.bytes_per_token), root)

    def _unsplit(self, request: ParsedRequest) -> Unsplit | None:
        """Return why the prompt can only be prefilled where it is decoded."""
        if self._state.block_tokens.groups:
            return Unsplit.GROUPS
        chat = request.prompt
        if self._splits and request.unsplit is None and isinstance(chat, ChatPrompt):
            return Unsplit.PICTURES if may_have_media(chat.messages) else None
        return request.unsplit

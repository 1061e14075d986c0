"""A router of 64 endpoints with a full prefix index, for benchmarks: no sockets, no tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from prometheus_client import CollectorRegistry

from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Spec
from perilune_gateway.model import Outcome, RequestHead, Routed, Tier, Tokens, TokenSource
from perilune_gateway.model.applied import Applied
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.recorder import Recorder
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.parsed import ParsedRequest, TokenPrompt
from perilune_gateway.request.paths import Api
from perilune_gateway.routing.new_router import new_router
from perilune_gateway.routing.router import Encode
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.sharing import Sharing

BLOCK = 16
PROMPT_TOKENS = 33_600
TURN_TOKENS = 600
SHARED_TOKENS = 4_000
"""Of the system prompt that all sessions begin with."""


class Given:
    """Stands for the tokenizer: tokens are given."""

    rewrites_answers = False

    def now(self, request: ParsedRequest) -> None:
        """Leave it to the caller."""


class Rig:
    """Sessions with prompts of about 33.6k tokens, each cached on one endpoint; turns grow them, engines
    announce what they prefill, and forget sessions that have grown too long."""

    def __init__(
        self,
        endpoints: int = 64,
        sessions: int = 480,
        seed: int = 1,
        listeners: Sequence[object] = (),
        sharing: Sharing | None = None,
    ) -> None:
        self.dice = Random(seed)
        self.addresses = [f"10.0.{n // 250}.{n % 250}:8000" for n in range(endpoints)]
        spec = Spec(
            Model(name="m", tokenize="estimate"),
            Engine(block_size=BLOCK),
            endpoints=tuple(EndpointSpec(address=a, events=(f"tcp://{a}",)) for a in self.addresses),
        )
        self.now = 0.0
        pool = Pool(Metadata("bench"), spec)
        state = replace(PoolState.of(pool, sharing=sharing), index=PrefixIndex(8_000_000, 30.0))
        self.state = state
        self.decisions = Decisions()
        self.index = state.index
        self.router = new_router(
            pool,
            state,
            Given(),
            (Recorder(Metrics(CollectorRegistry()), self.decisions), *listeners),
            clock=lambda: self.now,
            rng=self.dice,
        )
        self.shared = self.tokens(SHARED_TOKENS)
        self.prompts: dict[str, array[int]] = {}
        for n in range(sessions):
            name = f"session-{n}"
            self.prompts[name] = array("I", self.shared + self.tokens(PROMPT_TOKENS - SHARED_TOKENS))
            self.turn(name)
        self.names = list(self.prompts)
        """Of the sessions."""

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(150_000) for _ in range(count)]

    def ask(self, name: str) -> tuple[Encode, Tokens]:
        """Ask the session's next turn, tokenized."""
        prompt = self.prompts[name]
        if len(prompt) > PROMPT_TOKENS + 10 * TURN_TOKENS:
            del prompt[PROMPT_TOKENS - 10 * TURN_TOKENS :]
        prompt.extend(self.tokens(TURN_TOKENS))
        head = RequestHead(method="POST", path="/v1/completions", headers={"x-session-id": name})
        request = ParsedRequest(api=Api.COMPLETIONS, model="m", prompt=TokenPrompt(()))
        return Encode(head, request, 4 * len(prompt)), Tokens(
            count=len(prompt), source=TokenSource.LOCAL, ids=prompt
        )

    def end(self, name: str, routed: Routed) -> None:
        """Announce the whole prompt as the engine does, in the pieces of its steps, and end the answer."""
        target = routed.destinations[0]
        chain = blocks.chain(self.prompts[name], BLOCK, 0)
        for at in range(0, len(chain), 512):
            row, parent = chain[at : at + 512], chain[at - 1] if at else 0
            self.index.stored(target, Tier.DEVICE, row, self.now)
            self.router.on_applied(Applied(endpoint=target, parent=parent, stored=tuple(row)))
        self.router.on_response(routed.ticket, 200, target, True)
        self.router.finished(routed.ticket, Outcome.COMPLETED)

    def turn(self, name: str) -> None:
        self.now += 0.05
        routed = self.router.on_tokens(*self.ask(name))
        assert isinstance(routed, Routed)
        self.end(name, routed)

"""A router over real state, and a client's and an engine's view of it; only time is virtual.

rig = Rig(pool(endpoints=[A, B]))
routed = rig.route(range(20), head("/v1/completions", x_session_id="s"))
rig.stored(routed.destinations[0], range(20))
rig.finish(routed)
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from prometheus_client import CollectorRegistry
from routing_objects import head

from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Routing, Spec, Topology
from perilune_gateway.model import DecisionRecord, Load, NeedBody, Outcome, Refusal, RequestHead, Routed, Tier
from perilune_gateway.model.applied import Applied
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.recorder import Recorder
from perilune_gateway.observe.spans import Span
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.routing.new_router import new_router
from perilune_gateway.routing.prompts import TokenizesNow
from perilune_gateway.routing.router import Encode
from perilune_gateway.routing.trial import Trial
from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.sharing import Sharing

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
SMALL = Engine(block_size=4, kv_pool_tokens=10_000)
USUAL = Engine(block_size=16)
MODEL = Model(name="m", tokenize="estimate")


def pool(
    *,
    endpoints: Sequence[str | EndpointSpec] = (A, B),
    routing: Routing = Routing(),  # noqa: B008
    model: Model = MODEL,
    engine: Engine = SMALL,
    topology: Topology = Topology(),  # noqa: B008
) -> Pool:
    """Return a pool; an endpoint that is only named announces its blocks."""
    listed = tuple(
        EndpointSpec(address=e, events=(f"tcp://{e}",)) if isinstance(e, str) else e for e in endpoints
    )
    return Pool(Metadata("p"), Spec(model, engine, routing, topology, listed))


def completion(ids: Sequence[int], **body: object) -> bytes:
    return json.dumps({"model": "m", "prompt": list(ids), **body}).encode()


class Rig:
    def __init__(
        self,
        document: Pool,
        *,
        tokenizer: TokenizesNow | None = None,
        parity: ParityCheck | None = None,
        conformance: bool = False,
        seed: int = 0,
        send_span: Callable[[Span], None] | None = None,
        sharing: Sharing | None = None,
        listeners: Sequence[object] = (),
        trial: Trial | None = None,
    ) -> None:
        spec = document.spec
        self.document = document
        self.block_size = spec.engine.block_size
        self.now = 1000.0
        self.state = PoolState.of(document, sharing=sharing)
        if parity:
            self.state = replace(self.state, parity=parity)
        self.decisions = Decisions()
        self.metrics = Metrics(CollectorRegistry())
        self.router = new_router(
            document,
            self.state,
            tokenizer or Tokenizer(spec.model),
            (Recorder(self.metrics, self.decisions, send_span=send_span), *listeners),
            clock=lambda: self.now,
            stopwatch=lambda: self.now,
            rng=Random(seed),
            conformance=conformance,
            trial=trial,
        )

    # -- a client's view

    def ask(
        self, ids: Sequence[int] = range(20), h: RequestHead | None = None, **body: object
    ) -> Routed | Refusal:
        """Send a completions request with these token ids: headers first, then the body where it is
        needed."""
        h = h or head("/v1/completions")
        verdict = self.router.on_headers(h)
        if isinstance(verdict, NeedBody):
            answer = self.router.on_body(h, completion(ids, **body))
            assert not isinstance(answer, Encode)
            return answer
        return verdict

    def route(self, ids: Sequence[int] = range(20), h: RequestHead | None = None, **body: object) -> Routed:
        verdict = self.ask(ids, h, **body)
        assert isinstance(verdict, Routed), verdict
        return verdict

    def finish(self, routed: Routed, outcome: Outcome = Outcome.COMPLETED) -> None:
        self.router.finished(routed.ticket, outcome)

    # -- an engine's

    def stored(self, address: str, ids: Sequence[int], *, after: int = 0, tier: Tier = Tier.DEVICE) -> None:
        """Announce the blocks of these ids at `address`, the first `after` left out."""
        chain = blocks.chain(list(ids), self.block_size, 0)
        parent = chain[after - 1] if after else 0
        self.state.index.stored(address, tier, chain[after:], self.now)
        self.router.on_applied(
            Applied(endpoint=address, tier=tier, parent=parent, stored=tuple(chain[after:]))
        )

    def queue(self, address: str, seconds: float, tokens: int = 9_999) -> None:
        """Queue so much prefill of somebody else's at the endpoint."""
        self.state.loads.start(address, uncached_tokens=tokens, prefill_s=seconds, context_tokens=0)

    # -- ours

    def record(self, routed: Routed) -> DecisionRecord:
        found = self.decisions.get(routed.request_id)
        assert found is not None
        return found

    def load(self, address: str) -> Load:
        self.router.tick()
        return next(v.load for v in self.state.fleet.view(self.now) if v.endpoint.address == address)

    def pending(self) -> dict[str, int]:
        """Prefill tokens, by address."""
        self.router.tick()
        return {v.endpoint.address: v.load.pending_prefill_tokens for v in self.state.fleet.view(self.now)}

"""A router whose endpoints can hand KV over to each other, and announce what they store."""

from collections.abc import Mapping, Sequence

from router_rig import USUAL, A, B, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Engine, Migration, MoveTrigger, Pool, Routing
from perilune_gateway.feeds.pool_events import EventSink
from perilune_gateway.model import DecisionRecord, Routed
from perilune_gateway.model.kv_events import Batch, BlockStored
from perilune_gateway.request import block_hashes
from perilune_gateway.routing.handing_over import Legs
from perilune_gateway.state.connectors import Connector
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.sharing import Sharing

BLOCK = USUAL.block_size
DEFAULT = Routing().policy.name
PAGES = {A: "10.0.0.1:8998", B: "10.0.0.2:8998"}


class Handing(Rig):
    """`pages`: endpoint → its bootstrap page, both `ip:port`."""

    def __init__(
        self,
        *triggers: MoveTrigger,
        pages: Mapping[str, str] = PAGES,
        policy: str = DEFAULT,
        sharing: Sharing | None = None,
        listeners: Sequence[object] = (),
        engine: Engine = USUAL,
    ) -> None:
        """`engine`: with a store and without pages, engines only share that."""
        self.pages, self.engine = pages, engine
        self.routing = Routing(
            policy=chosen(policy), migration=Migration(triggers=triggers or (MoveTrigger.DRAIN,))
        )
        super().__init__(self.pool(), sharing=sharing, listeners=listeners)
        blocks = EngineBlocks(self.state.index, BLOCK, store=engine.store)
        tokens = self.state.block_tokens
        self.sink = EventSink(blocks, self.state.parity, self.router, lambda: self.now, tokens)
        for address in filter(pages.get, pages):
            self.state.connectors.answered(address, Connector([f"engine at {address}"], 1))
        self.handing_over = self.router.moves.handing_over

    def pool(self, draining: str = "") -> Pool:
        listed = [
            EndpointSpec(address=a, events=(f"tcp://{a}",), draining=a == draining, bootstrap=page)
            for a, page in self.pages.items()
        ]
        return pool(endpoints=listed, routing=self.routing, engine=self.engine)

    def announce(self, address: str, ids: Sequence[int], after: int = 0, block: int = BLOCK) -> None:
        """Announce that the engine, whose blocks have so many tokens, has stored the prompt's whole blocks;
        it had the first `after` tokens before."""
        whole = list(ids[: len(ids) // block * block])
        chain, known = block_hashes.chain(whole, block, 0), after // block
        event = BlockStored(
            block_hashes=chain[known:],
            parent_block_hash=chain[known - 1] if known else None,
            token_ids=whole[after:],
            block_size=block,
        )
        self.sink.batch(address, 0, Batch(0.0, [event]), 0.0)

    def send(self, session: str, ids: Sequence[int], **body: object) -> Routed:
        length = str(len(completion(ids)))
        return self.route(ids, head("/v1/completions", x_session_id=session, content_length=length), **body)

    def turn(self, session: str, ids: Sequence[int]) -> DecisionRecord:
        """Play a whole turn, and announce it."""
        routed = self.send(session, ids)
        self.announce(routed.destinations[0], ids)
        self.finish(routed)
        return self.record(routed)

    def drain(self, address: str) -> list[Legs]:
        """Drain the endpoint, and return the rounds that begin."""
        self.router.configure(self.pool(draining=address))
        self.router.plan_moves()
        return self.handing_over.due()

    def host(self, session: str) -> str:
        (found,) = self.state.sessions.matching(session)
        return found.host


def text(seed: int, tokens: int) -> list[int]:
    return [seed * 1_000_000 + i for i in range(tokens)]

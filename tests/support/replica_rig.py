"""A replica of the gateway whose endpoints can hand KV over, and whose state is shared."""

import asyncio

from handing_rig import DEFAULT, Handing
from routing_objects import chosen

from perilune_api.pool import Migration, MoveTrigger, Pool, Routing
from perilune_gateway.model.shared import Batch, Names, decode, encode
from perilune_gateway.state.replicas import Replicas
from perilune_gateway.state.sharing import Sharing


class HandingReplica(Handing):
    def __init__(self, name: str, moves_per_minute: int = 50, policy: str = DEFAULT) -> None:
        self.policy = policy
        self.changed = asyncio.Event()
        self.moves_per_minute = moves_per_minute
        sharing = Sharing(
            name, Names(b"key"), lambda: self.now, lambda: 1_700_000_000.0 + self.now, self.changed.set
        )
        super().__init__(sharing=sharing)
        self.name = name
        self.router.configure(self.pool())
        self.shared = Replicas(self.state, self.router.new_sessions, self.router.moves.handing_over)

    def pool(self, draining: str = "") -> Pool:
        migration = Migration(triggers=(MoveTrigger.DRAIN,), moves_per_minute=self.moves_per_minute)
        self.routing = Routing(policy=chosen(self.policy), migration=migration)
        return super().pool(draining)

    def tells(self, *others: "HandingReplica", alive: bool = False) -> bytes:
        message = encode(Batch(self.name, self.shared.take(alive=alive).changes, 1))
        for other in others:
            other.shared.apply(decode(message))
        return message

    def goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.shared.lapse()

"""What the gateway knows of one session.

*Bytes per token* of its bodies give an estimate for a turn whose body is not read. The *chain* has the blocks
of its context as far as they are known (chains.py), the *prompt tail* ends its last prompt (prompt_tails.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import Struct

from perilune_gateway.model import SessionKey, Subject
from perilune_gateway.model.shared import NEVER, Bound, BoundElsewhere, Stamp

UNKNOWN = SessionKey("", "")
"""Key of a session that only other replicas have routed."""


UNLIKE_ANY = -1


class Session(Struct, gc=False, kw_only=True):
    """One session's state. Times are monotonic seconds."""

    key: SessionKey
    host: str = ""
    parent: SessionKey | None = None
    turns: int = 0
    seen_at: float = 0.0
    moved_at: float = -inf
    moves: int = 0
    context_tokens: int = 0
    """Number of tokens of its context: the last prompt as counted or estimated, then as KV events report."""
    body_bytes: int = 0
    """Bytes of its last body, whether read or not."""
    bytes_per_token: float = 0.0
    """Bytes per token of the last body that was read. 0 if none was."""
    chain: Sequence[int] = ()
    """Block hashes of its context, from the start to the tail. Empty if they are unknown."""
    fork: int = 0
    """Number of blocks of the chain up to the fork. 0 if it is unknown."""
    forked: bool = False
    """Whether its latest turn of which that is known did not go on where its context ended."""
    unblocked_tokens: int = 0
    """Number of tokens that its host caches, if they have no block hashes."""
    unconfirmed: bool = False
    """Whether the last turn was not read and no KV event has continued the chain since."""
    prompt_tail: int = 0
    """Block hash of the prompt tail. 0 if it is unknown."""
    prompt_blocks: int = 0
    """Number of full blocks of the prompt that ends in `prompt_tail`."""
    prompt_tokens: int = 0
    """Number of tokens of that prompt."""
    ticket: int = -1
    """Ticket of the latest request; -1: none."""
    chained: bool = False
    """Whether a request of it named an earlier response, which only its host's process has."""
    lead: int = 0
    """Hash of what its next prompt has before the messages, if that names the last response; UNLIKE_ANY if
    that begins otherwise than its context in any case. 0 if it is not known."""
    came_from: str = ""
    """The endpoint that handed its KV over to the host. Empty if it did not come so."""
    inferred: bool = False
    """Whether the gateway inferred the session. Clients with equal prompts then share it."""
    unserved: bool = False
    """Whether an engine answered 404 since its last body was read: it does not serve what was asked for."""
    failures: int = 0
    """Number of its latest requests, one after the other, that failed at its host."""
    name: bytes = b""
    """Its name among replicas. Empty if it has none yet."""
    stamp: Stamp = NEVER
    """When its latest turn was decided, and by which replica."""
    runs_at: str = ""
    """The other replica at which its latest turn runs, as far as it has told. Empty if at none."""
    shared_blocks: int = 0
    """Number of blocks of the chain as the replica that decided the latest turn knows it. 0 if we decided
    it."""
    shared_tail: int = 0
    """The last of those blocks."""

    @property
    def subject(self) -> Subject:
        """What identifies it in a planned move: its key, or its name while the key is unknown."""
        return self.name if self.key is UNKNOWN else self.key

    @property
    def follows(self) -> bool:
        """Whether the chain contains all that other replicas know of it."""
        at = self.shared_blocks
        return not at or (len(self.chain) >= at and self.chain[at - 1] == self.shared_tail)

    def begins_with(self, lead: int) -> bool:
        """Return whether a prompt that names the last response may begin as the context does. `lead`: hash of
        what that prompt has before the messages."""
        return self.lead in (0, lead)

    def goes_on(self, blocks: Sequence[int]) -> bool:
        """Return whether a prompt with these full blocks contains the whole context."""
        return len(blocks) >= len(self.chain) and blocks[len(self.chain) - 1] == self.tail

    @property
    def tail(self) -> int:
        """The last block of the chain. 0 if it is unknown."""
        return self.chain[-1] if self.chain else 0

    def take_over(self, bound: Bound, stamp: Stamp) -> None:
        """Take over all but host and prompt from a turn at another replica."""
        self.stamp, self.runs_at = stamp, stamp.replica if bound.running else ""
        self.turns, self.chained = bound.turns, bound.chained
        self.context_tokens, self.body_bytes = bound.context_tokens, bound.body_bytes
        self.bytes_per_token = bound.bytes_per_token
        self.shared_blocks, self.shared_tail = bound.blocks, bound.tail

    def estimate_tokens(self, body_bytes: int, default_bytes_per_token: float) -> int:
        """Return the estimated number of tokens of an unread body.

        The estimate is the known context plus the growth of the body at the session's bytes per token. A body
        that shrank was rewritten, so its whole length counts. A body without a length counts as the context.
        """
        ratio = self.bytes_per_token or default_bytes_per_token
        if not body_bytes:
            return self.context_tokens
        if body_bytes < self.body_bytes or not self.context_tokens:
            return int(body_bytes / ratio)
        return self.context_tokens + int((body_bytes - self.body_bytes) / ratio)


def copied(key: SessionKey, there: BoundElsewhere) -> Session:
    """Return a session that only other replicas have routed, as a copy that no other part knows."""
    session = Session(key=key, host=there.bound.host, name=there.bound.session)
    session.seen_at, session.moved_at = there.heard_at, there.moved_at
    session.take_over(there.bound, there.stamp)
    return session

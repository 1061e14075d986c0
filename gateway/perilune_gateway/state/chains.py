"""The chains of sessions: the blocks of their contexts, as far as they are known.

KV events make a chain longer (`stored`), also during turns that were not read. The *fork* is the end of the
last prompt: a chat template may render an answer differently in the next prompt (without its reasoning), so
the chain can continue there too, or a block before, where the prompt's last block has words of the template
that the next prompt leaves out (Qwen3's empty thinking). At most `max_blocks` blocks are kept; the chains
that were used least recently are forgotten first. What a host still caches of a chain is a question for the
prefix index.

`stored` costs O(blocks of the event) and copies the chain that it makes longer; all else costs O(1).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from perilune_gateway.model import SessionKey
from perilune_gateway.state.session import Session


class Chains:
    """The chains of a pool's sessions."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._by_end: dict[int, Session] = {}
        """Block where a chain may continue (`_ends`) → its session."""
        self._chained: OrderedDict[SessionKey, Session] = OrderedDict()
        """The sessions that have a chain, the one whose chain changed least recently first."""
        self._blocks = 0
        """Number of blocks of all chains."""

    def replace(self, session: Session, chain: Sequence[int], fork: int) -> None:
        """Replace the session's chain."""
        by_end = self._by_end
        for end in self._ends(session):
            if by_end.get(session.chain[end - 1]) is session:
                del by_end[session.chain[end - 1]]
        self._blocks += len(chain) - len(session.chain)
        session.chain, session.fork = chain, fork
        for end in self._ends(session):
            by_end[chain[end - 1]] = session
        self._chained.pop(session.key, None)
        if chain:
            self._chained[session.key] = session
            while self._blocks > self.max_blocks and len(self._chained) > 1:
                _, oldest = self._chained.popitem(last=False)
                self.replace(oldest, (), 0)

    def stored(
        self, host: str, parent: int, blocks: Sequence[int], block_size: int, stride: int = 1
    ) -> tuple[Session, int] | None:
        """Record a KV event: `host` stored `blocks` after `parent`. If they continue a session on that host
        (its last blocks may come back with them), its chain grows. Returns that session and how many tokens
        of its context were stored, else None. `stride`: the number of blocks in one of the host's engine."""
        by_end, at = self._by_end, len(blocks) - 1
        while at >= 0 and blocks[at] not in by_end:
            at -= 1
        end = blocks[at] if at >= 0 else parent
        session = by_end.get(end)
        if session is None or session.host != host or not blocks:
            return None
        length = next(n for n in self._ends(session) if session.chain[n - 1] == end)
        if length < session.fork and not session.unconfirmed:
            return None  # its prompt was read: these blocks are another's, with the same beginning
        news = blocks[at + 1 :]
        if news:
            known = session.chain[:length]
            # The blocks of a prompt come first and mostly in one event, those of an answer one by one.
            prompt = session.unconfirmed or len(news) > stride
            chain = array("Q", known)
            chain.extend(news)
            self.replace(session, chain, len(chain) if prompt else session.fork)
            session.context_tokens = len(chain) * block_size
            session.unconfirmed = False
        return session, len(blocks) * block_size

    @staticmethod
    def _ends(session: Session) -> Sequence[int]:
        """Return the lengths at which the chain may continue, the longest first."""
        return [n for n in (len(session.chain), session.fork, session.fork - 1) if n > 0]

"""The last prompts of sessions: which session does a prompt without a session id continue?

The *prompt tail* is the last full block of the last prompt that was read. A later prompt that contains this
block and is longer continues the session (`continued`). A prompt that ends with this block replaces it,
because only the latest can be continued (`ending`). `continued` does one dict lookup per distinct length of
the tenant's prompts, at most one per block of the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from perilune_gateway.state.session import Session

_SORTING = 4
"""Cost of sorting one length, in units of the cost of looking up one block."""


class PromptTails:
    """The last prompts of a pool's sessions, by tenant."""

    def __init__(self) -> None:
        self._of: dict[str, _OfTenant] = {}

    def continued(self, tenant: str, blocks: Sequence[int], tokens: int) -> Session | None:
        """Return the session with the longest last prompt that is a prefix of these blocks and has fewer
        tokens."""
        prompts = self._of.get(tenant)
        known = prompts.within(blocks) if prompts else iter(())
        return next((session for session in known if session.prompt_tokens < tokens), None)

    def ending(self, tenant: str, block: int) -> Session | None:
        """Return the session whose last prompt ends with this block."""
        prompts = self._of.get(tenant)
        return prompts.by_tail.get(block) if prompts else None

    def set(self, session: Session, tail: int, blocks: int) -> None:
        """Replace the session's last prompt by one of so many blocks that ends with `tail`."""
        self.drop(session)
        session.prompt_tail, session.prompt_blocks = tail, blocks
        self._of.setdefault(session.key.tenant, _OfTenant()).add(session)

    def drop(self, session: Session) -> None:
        """Forget the session's last prompt."""
        prompts = self._of.get(session.key.tenant)
        if prompts and prompts.drop(session) and not prompts.by_tail:
            del self._of[session.key.tenant]


class _OfTenant:
    """The last prompts of a tenant's sessions."""

    __slots__ = ("by_tail", "lengths")

    def __init__(self) -> None:
        self.by_tail: dict[int, Session] = {}
        """Last block of a prompt → its session; for equal prompts the latest session."""
        self.lengths: Counter[int] = Counter()
        """Number of blocks → how many prompts have that length."""

    def add(self, session: Session) -> None:
        if session.prompt_tail not in self.by_tail:
            self.lengths[session.prompt_blocks] += 1
        self.by_tail[session.prompt_tail] = session

    def drop(self, session: Session) -> bool:
        """Remove the session's prompt. Returns whether it was present."""
        if self.by_tail.get(session.prompt_tail) is not session:
            return False
        del self.by_tail[session.prompt_tail]
        self.lengths[session.prompt_blocks] -= 1
        if not self.lengths[session.prompt_blocks]:
            del self.lengths[session.prompt_blocks]
        return True

    def within(self, blocks: Sequence[int]) -> Iterator[Session]:
        """Return the sessions whose last prompt is a prefix of these blocks, the longest first."""
        if _SORTING * len(self.lengths) < len(blocks):
            lengths = sorted(self.lengths, reverse=True)
            ends = [blocks[length - 1] for length in lengths if length <= len(blocks)]
        else:
            ends = list(reversed(blocks))
        return (self.by_tail[end] for end in ends if end in self.by_tail)

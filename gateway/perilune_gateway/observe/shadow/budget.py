"""The account of the CPU time that judging may take: it fills with time, and is drawn when time was spent.

What a decision costs is known only afterwards, so a decision is judged while the account is not empty, and
what was overdrawn is waited for.
"""

from __future__ import annotations

BURST_S = 5.0
"""The account is full after this many seconds without spending."""


class CpuBudget:
    """The account of one gateway."""

    def __init__(self, cores: float, now: float) -> None:
        self._cores = cores
        self._balance_s = cores * BURST_S
        self._at = now

    def allows(self, now: float) -> bool:
        """Return whether something may be spent now."""
        self._balance_s = min(self._cores * BURST_S, self._balance_s + self._cores * (now - self._at))
        self._at = now
        return self._balance_s > 0

    def spend(self, seconds: float) -> None:
        """Record that so many seconds of CPU were spent."""
        self._balance_s -= seconds

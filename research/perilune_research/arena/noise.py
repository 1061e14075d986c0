"""How much of the machine other programs use, beside this process and the children that it has ended.

A load average would not tell: it holds the arena's own cells for minutes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from time import monotonic, time

NOISY = 0.15
"""Share of all CPUs: with more of it used by other programs, a cell's times say little about its router."""
_SAMPLE_S = 0.5
_STAT = Path("/proc/stat")
_OURS_OR_IDLE = (3, 4, 5, 6)
"""Fields of its first line that are not work of a process: idle, waiting for a disk, interrupts."""


class Noise:
    """Watches the machine from its construction until `end`."""

    load_average: float
    lasted_s: float
    others: float | None
    """Share of all CPUs; None if that cannot be told."""

    def __init__(self) -> None:
        self.began_at = time()
        self.load_average = os.getloadavg()[0]
        self._from = monotonic(), _all_s(), _own_s()

    def end(self, *, tells: bool = True) -> Noise:
        """`tells`: whether all that the arena caused was done by this process and its children."""
        began_s, all_s, own_s = self._from
        self.lasted_s = monotonic() - began_s
        used_s = _all_s() - all_s - (_own_s() - own_s)
        cpus = os.cpu_count() or 1
        self.others = max(0.0, used_s / self.lasted_s / cpus) if tells and _STAT.exists() else None
        return self

    @property
    def is_noisy(self) -> bool:
        return self.others is not None and self.others > NOISY

    def __str__(self) -> str:
        return f"other programs used {self.others or 0:.0%} of the CPUs"


async def sample() -> Noise:
    """Watch the machine for a moment in which nothing is played."""
    noise = Noise()
    await asyncio.sleep(_SAMPLE_S)
    return noise.end()


def _all_s() -> float:
    """Return the CPU seconds that all processes have used since the machine's start, and those that it did
    not get of its host; 0 if the system does not tell."""
    if not _STAT.exists():
        return 0.0
    ticks = list(map(int, _STAT.read_text().split("\n", 1)[0].split()[1:9]))
    used = sum(n for field, n in enumerate(ticks) if field not in _OURS_OR_IDLE)
    return used / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the CPU seconds of this process, and of the children that have ended."""
    return sum(os.times()[:4])

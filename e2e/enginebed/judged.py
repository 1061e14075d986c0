"""What the gateway predicted of each request, compared with what its engine counted.

    conversations ─ play ─▶ Judged for each request ─ tally ─▶ a row of the table for each phase of a run

`play` sends turns through Envoy and reads each request's decision from the gateway's admin page.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import aiohttp

from enginebed.conversations import Conversation
from enginebed.rig import Rig
from perilune_api.names import DECISION_HEADER


@dataclass(frozen=True, slots=True)
class Judged:
    """One request. All numbers are tokens; `failed` is empty for one that was answered."""

    kind: str
    failed: str = ""
    request_id: str = ""
    target: str = ""
    source: str = ""
    """Where the gateway had the prompt's tokens from; empty when it decided from the headers."""
    phase: str = ""
    prompt: int = 0
    prompt_predicted: int = 0
    cached: int = 0
    predicted: int = 0
    alone: bool = True
    """Whether no other request was open at the same time."""
    at: float = 0.0
    """When it ended, as time.monotonic() tells."""
    seconds: float = 0.0
    judged: bool = True
    """Whether the gateway could still be asked what it had predicted."""

    @property
    def above(self) -> int:
        """How much more the gateway promised than there was."""
        return self.predicted - self.cached


@dataclass(slots=True)
class Phase:
    """A part of a run."""

    name: str
    requests: list[Judged] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    back_s: float | None = None
    """Seconds until what was killed served again; None if nothing was killed."""
    pause_s: float = 0.0
    """Between a client's turns, where others need the cores: engines that start, or the gateway."""

    @property
    def answered(self) -> list[Judged]:
        return [each for each in self.requests if not each.failed and each.judged]

    @property
    def failed(self) -> list[Judged]:
        return [each for each in self.requests if each.failed]

    @property
    def exact(self) -> float:
        """Share of the predictions that were exact."""
        answered = self.answered
        return sum(each.above == 0 for each in answered) / len(answered) if answered else 0.0

    @property
    def last_failure_s(self) -> float:
        """Seconds from the beginning to the end of the last request that failed; 0 if none failed."""
        return max((each.at - self.began for each in self.failed), default=0.0)

    @property
    def slowest_s(self) -> float:
        return max((each.seconds for each in self.requests), default=0.0)

    def far_above(self, block: int) -> list[Judged]:
        """Those whose prediction promised over a block too much, outside bursts."""
        return [each for each in self.answered if each.alone and each.above > block]


async def play(
    rig: Rig,
    conversations: Sequence[Conversation],
    phase: Phase,
    requests: int,
    *,
    at_once: int = 1,
    enough: asyncio.Event | None = None,
) -> None:
    """Play `requests` turns, or as many until `enough` is set; `at_once` conversations at a time, each one
    turn after the other. The phase's name decides which ones."""
    rng = Random(phase.name)
    free = list(conversations)
    left = requests

    async def worker() -> None:
        nonlocal left
        while left > 0 and not (enough and enough.is_set()):
            left -= 1
            one = free.pop(rng.randrange(len(free)))
            phase.requests.append(await turn(rig, one, alone=at_once == 1))
            free.append(one)
            if phase.pause_s:
                await asyncio.sleep(phase.pause_s)

    await asyncio.gather(*(worker() for _ in range(at_once)))


async def turn(rig: Rig, conversation: Conversation, *, alone: bool = True) -> Judged:
    """Play a conversation's next turn."""
    path, body, headers = conversation.ask()
    headers[DECISION_HEADER] = "yes"
    kind, began = conversation.kind, time.monotonic()

    def failed(why: str) -> Judged:
        conversation.unanswered()
        at = time.monotonic()
        return Judged(kind, why, alone=alone, at=at, seconds=at - began)

    try:
        async with rig.http.post(rig.url + path, json=body, headers=headers) as answer:
            if answer.status != 200:
                return failed(f"{answer.status} {(await answer.text())[:300]}")
            said, request_id = await answer.json(), answer.headers.get(DECISION_HEADER, "")
    except (aiohttp.ClientError, TimeoutError) as error:
        return failed(repr(error))
    at = time.monotonic()
    usage = conversation.answered(said)
    try:
        page = await rig.page(f"/api/decisions/{request_id.rpartition('request=')[2]}")
    except (aiohttp.ClientError, TimeoutError):  # the gateway has been killed since
        return Judged(kind, at=at, seconds=at - began, prompt=usage.prompt, judged=False)
    return Judged(
        kind,
        "",
        request_id,
        page["target"],
        page["token_source"],
        page["phase"],
        usage.prompt,
        page["prompt_tokens"],
        usage.cached,
        page["cached_tokens"],
        alone,
        at,
        at - began,
    )


def table(phases: Iterable[Phase], block: int) -> str:
    """Return a table with a row for each phase."""
    head = (
        *("phase", "requests", "exact", "below", "above", "> 1 block", "prompt equal", "cached"),
        *("slowest", "failed", "last failure", "back"),
    )
    rows = [head]
    for phase in phases:
        answered = phase.answered
        prompts, cached = sum(each.prompt for each in answered), sum(each.cached for each in answered)
        counted = [each for each in answered if each.source != "estimate"]
        rows.append(
            (
                phase.name,
                str(len(phase.requests)),
                f"{100 * phase.exact:.1f} %",
                str(sum(each.above < 0 for each in answered)),
                str(sum(each.above > 0 for each in answered)),
                str(sum(each.above > block for each in answered)),
                f"{sum(each.prompt == each.prompt_predicted for each in counted)} of {len(counted)}",
                f"{100 * cached / prompts:.0f} %" if prompts else "",
                f"{phase.slowest_s:.1f} s",
                str(len(phase.failed)),
                f"{phase.last_failure_s:.1f} s" if phase.failed else "",
                "" if phase.back_s is None else f"{phase.back_s:.1f} s",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def misses(phase: Phase) -> str:
    """Return the predictions that were not exact, and what failed, for people."""
    lines = [
        f"{each.kind}: predicted {each.predicted}, cached {each.cached} of {each.prompt}"
        f" (counted {each.prompt_predicted}, {each.source or 'no tokens'}, {each.phase}) at {each.target}"
        for each in phase.answered
        if each.above or each.prompt != each.prompt_predicted
    ]
    failures = Counter(each.failed for each in phase.requests if each.failed)
    return "\n".join([*lines, *(f"{count} × {why}" for why, count in failures.items())])

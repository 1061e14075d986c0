"""What an infinite prefix cache would serve of a trace, and how long its turns take alone.

Prompts are walked segment by segment through a tree of everything seen before: the leading known segments
are reused, the first unknown one ends the match. A turn's answer is cached behind its prompt, as engines do.
Every reused token belongs to one kind, by who computed it *first*:

- intra-session: an earlier turn of the same session;
- shared prefix: another session, and many sessions begin with it (system prompt, tool definitions);
- cross-session: another session, otherwise.

In addition, `own_tokens`: what a cache that forgets other sessions would serve. Cost: a dict look-up per
segment and turn. Matches end at segment ends: an engine also loses a part of a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perilune_gateway.model import EngineModel
from perilune_lab.traces.model import Segment, Turn

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens of one turn that an infinite cache would serve."""

    intra_tokens: int = 0
    cross_tokens: int = 0
    shared_tokens: int = 0
    own_tokens: int = 0
    """Computed, or computed again, by the session's own earlier turns."""

    @property
    def any_tokens(self) -> int:
        return self.intra_tokens + self.cross_tokens + self.shared_tokens


def reuse(turns: Sequence[Turn], many: int | None = None) -> list[Reuse]:
    """Return the reuse of each turn, in the given order, which is the order of submission.

    `many`: sessions that must begin with a segment to make it a shared prefix; by default 1 % of the
    sessions, at least 3."""
    if many is None:
        many = max(3, len({turn.session for turn in turns}) // 100)
    tree = _Tree()
    begun = _begun(turns, tree)
    computed_by: dict[int, str] = {}
    own: dict[str, set[int]] = defaultdict(set)
    found = []
    for turn in turns:
        nodes = tree.path(turn.prompt)
        known_own = own[turn.session]
        intra = cross = shared = own_tokens = 0
        whole = own_whole = True
        for node, segment in zip(nodes, turn.prompt, strict=True):
            whole = whole and node in computed_by
            own_whole = own_whole and node in known_own
            if own_whole:
                own_tokens += segment.tokens
            if not whole:
                break  # the session's own prefixes are among all known ones
            if computed_by[node] == turn.session:
                intra += segment.tokens
            elif begun[node] >= many:
                shared += segment.tokens
            else:
                cross += segment.tokens
        found.append(Reuse(intra, cross, shared, own_tokens))
        nodes.append(tree.child(nodes[-1] if nodes else _ROOT, turn.answer))
        known_own.update(nodes)
        for node in nodes:
            computed_by.setdefault(node, turn.session)
    return found


def ideal_turn_s(engine: EngineModel, turn: Turn, cached_tokens: int) -> float:
    """Return the seconds from submission to the last token of a turn that runs alone on an endpoint with
    `cached_tokens` of it cached."""
    return ideal_ttft_s(engine, turn.prompt_tokens, cached_tokens) + ideal_decode_s(
        engine, turn.prompt_tokens, turn.output_tokens
    )


def ideal_ttft_s(engine: EngineModel, prompt_tokens: int, cached_tokens: int) -> float:
    """Return the seconds to the first token of a request that runs alone. At least one token is computed,
    whatever is cached."""
    new = max(1, prompt_tokens - cached_tokens)
    return engine.request_overhead_s(prompt_tokens) + engine.prefill_s(new, prompt_tokens - new)


def ideal_decode_s(engine: EngineModel, prompt_tokens: int, output_tokens: int) -> float:
    """Return the seconds from the first token to the last of a request that runs alone, computed at the mean
    context."""
    steps = max(0, output_tokens - 1)
    return steps * engine.decode_step_s(1, prompt_tokens + steps // 2)


class _Tree:
    """Numbers every distinct prefix; a node is a prefix."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Segment], int] = {}

    def child(self, parent: int, segment: Segment) -> int:
        return self._children.setdefault((parent, segment), len(self._children) + 1)

    def path(self, prompt: Iterable[Segment]) -> list[int]:
        nodes, node = [], _ROOT
        for segment in prompt:
            node = self.child(node, segment)
            nodes.append(node)
        return nodes


def _begun(turns: Iterable[Turn], tree: _Tree) -> dict[int, int]:
    """Return for each prefix how many sessions' first prompts begin with it."""
    count: dict[int, int] = defaultdict(int)
    seen: set[str] = set()
    for turn in turns:
        if turn.session not in seen:
            seen.add(turn.session)
            for node in tree.path(turn.prompt):
                count[node] += 1
    return count

"""Prompts as positions in a tree of runs.

A run is a stretch of text inside which no prompt branches off. A session's context usually consists of a run
that it shares with others (system prompt, task) and one run of its own, however many turns it has. A prompt
is then two numbers, (run, depth): everything from the root down to token `depth`, which lies in `run`. Prefix
caches and the index keep one depth per run instead of thousands of blocks.

`build` makes the tree once per trace: it puts the prompts' segments into a tree and joins every chain without
branches into one run. Cost: a dict look-up per segment that a turn adds to its session's previous prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from perilune_lab.traces.model import Segment, Turn

ROOT = -1
"""Parent of a run that begins a prompt."""


class Runs:
    """The tree. A run covers the tokens (start, end] of every prompt that goes through it."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.start: list[int] = []
        self.end: list[int] = []
        self.chain: list[tuple[int, ...]] = []
        """By run: the runs from the root down to this run."""

    def __len__(self) -> int:
        return len(self.parent)

    def add(self, parent: int, tokens: int) -> int:
        """Add a run of `tokens` that continues `parent` (or ROOT); return its number."""
        run = len(self.parent)
        start = self.end[parent] if parent != ROOT else 0
        self.parent.append(parent)
        self.start.append(start)
        self.end.append(start + tokens)
        self.chain.append((*(self.chain[parent] if parent != ROOT else ()), run))
        return run


Position = tuple[int, int]
"""(run, depth in tokens from the beginning of the prompt)"""


def build(sessions: Sequence[Sequence[Turn]]) -> tuple[Runs, list[list[tuple[Position, Position]]]]:
    """Return the tree of all turns, and per session and turn where its prompt and its answer end."""
    tree = _Tree()
    nodes = [_session_nodes(tree, turns) for turns in sessions]
    runs, run_of = tree.compress()
    depth = tree.depth
    ends = [[((run_of[p], depth[p]), (run_of[a], depth[a])) for p, a in session] for session in nodes]
    return runs, ends


def _session_nodes(tree: _Tree, turns: Sequence[Turn]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    before: tuple[Segment, ...] = ()
    node = 0
    for turn in turns:
        prompt = turn.prompt
        if before and prompt[: len(before)] == before:
            new = prompt[len(before) :]
        else:
            node, new = 0, prompt
        for segment in new:
            node = tree.child(node, segment)
        before = prompt
        found.append((node, tree.child(node, turn.answer)))
    return found


class _Tree:
    """A tree with one node per distinct prefix that ends at a segment's end; node 0 is the root."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, str, int], int] = {}
        self.parent = [-1]
        self.depth = [0]
        self.branches = [2]
        """By node: number of its children. The root always counts as branching."""

    def child(self, parent: int, segment: Segment) -> int:
        key = (parent, segment.key, segment.tokens)
        node = self.children.get(key)
        if node is None:
            node = self.children[key] = len(self.parent)
            self.parent.append(parent)
            self.depth.append(self.depth[parent] + segment.tokens)
            self.branches.append(0)
            self.branches[parent] += 1
        return node

    def compress(self) -> tuple[Runs, list[int]]:
        """Build the runs; return them with the run of each node."""
        runs = Runs()
        run_of = [ROOT]
        for node in range(1, len(self.parent)):
            above = self.parent[node]
            tokens = self.depth[node] - self.depth[above]
            if self.branches[above] == 1:
                run_of.append(run_of[above])
                runs.end[run_of[above]] += tokens
            else:
                run_of.append(runs.add(run_of[above], tokens))
        return runs, run_of

"""`perilune tune`: finds a policy's parameters on a pool's own decision log, in the simulator.

1. Read the log: sessions, pool, policy and its parameters.
2. Split the sessions: every second one is held out.
3. Search parameters on one half.
4. Play the held-out half with the old and with the best parameters, and say what they gain, and how sure.

Exit status: 0; 2 for a wrong call or log; 130 after Ctrl-C, which prints the best parameters until then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.table import Table

from perilune_api.pool import SpecError
from perilune_lab.quantiles import quantile
from perilune_lab.simulate.options import add_runs
from perilune_lab.terminal.arguments import count, one_of
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.decision_logs import entries
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import live_policies
from perilune_lab.terminal.policy_parameters import NUMBERS, Parameter, block_of, parameters
from perilune_lab.terminal.processes import mapped
from perilune_lab.traces.model import Trace
from perilune_lab.tune.gain import Change, Objective, Study, Waits, changes, play, score
from perilune_lab.tune.recorded import Recording, deployment, halves
from perilune_lab.tune.search import Point, Tried, best_of, search

SCHEMA = "perilune.tune/v1"
TURNS, TRIALS, SEEDS = 3000, 24, 2

_EPILOG = """\
examples:
  perilune-gateway --pool pool.yaml --decision-log decisions.jsonl       records; an hour or a day
  perilune tune --log decisions.jsonl
      the pool's own policy, all of its numbers: minutes
  perilune tune --log decisions.jsonl.1 decisions.jsonl --policy ear --parameters hotPendingTokens
  perilune tune --log decisions.jsonl --policy mine --objective e2e --json tuned.json

What is played: the log's sessions, with their lengths and gaps, before as many modelled engines as the pool
has, of the speed that the gateway measured. Every second session is held out: the search never sees it. Each
half comes at twice the speed, so that the pool is as busy as it was. Old and new parameters play the same
held-out sessions with the same seeds; intervals are of 95 %, by bootstrap over sessions.

What it cannot know: prompts are not in the log, so what sessions share is a guess from what was cached; nor
is output, which follows from times. Compare the two lines "log" and "simulated": where they are far apart,
do not trust the rest. Try what it finds on a part of the traffic before you give it all.
"""


def main(argv: Sequence[str]) -> int:
    """Return the exit status. Raises SystemExit for `--help` and unknown options."""
    args = _parser().parse_args(argv)
    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 120)
    err = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    try:
        return run(args, out, err)
    except SpecError as error:
        return wrong_call("perilune tune", error)


def run(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Search, compare and print. Returns 0. Raises SpecError."""
    recording = _read(args.log, err)
    pool = deployment(recording)
    tuned_half, held_out = halves(recording, pool, args.turns)
    policy = args.policy or recording.policies.most_common(1)[0][0]
    if len(live_policies(policy, "--policy")) != 1:
        raise SpecError(f"{policy}: must be one policy - at `--policy`")
    study = Study(
        deployment=pool,
        routing=recording.routing,
        policy=policy,
        seeds=tuple(range(1, args.seeds + 1)),
        objective=args.objective,
    )
    chosen = _chosen(policy, args.parameters)
    start = _present(study, chosen)
    err.print(_plan(recording, study, tuned_half, held_out, chosen, args.trials))
    tried = _search(study, tuned_half, start, chosen, args, err)
    best = best_of(tried)
    before = play(study, held_out, start)
    after = before if best.point == start else play(study, held_out, best.point)
    found = changes(before, after)
    for part in report(study, recording, start, best.point, before, after, found):
        out.print(part)
    if args.json:
        _write(args.json, document(study, recording, start, best, found, tried), err)
    return 0


# -- steps -----------------------------------------------------------------------------------------------


def _read(paths: Sequence[Path], err: Console) -> Recording:
    recording = Recording()
    for _, entry in entries(paths, err, lambda: f"{recording.turns:,} decisions read"):
        recording.take(entry)
    return recording


def _chosen(policy: str, names: str) -> tuple[Parameter, ...]:
    """Return the parameters to search. Raises SpecError."""
    every = {p.name: p for p in parameters(policy) if p.kind in NUMBERS or p.choices}
    if not every:
        raise SpecError(f"{policy} has no parameters to tune - at `--policy`")
    wanted = tuple(map(str.strip, names.split(","))) if names else tuple(every)
    for name in wanted:
        if name not in every:
            known = ", ".join(every)
            raise SpecError(f"{policy} has no parameter {name!r}, known are {known} - at `--parameters`")
    return tuple(every[name] for name in wanted)


def _present(study: Study, chosen: Sequence[Parameter]) -> Point:
    """Return the values that the pool has now."""
    given = msgspec.to_builtins(study.routing.policy)
    block = given["outside"].get(study.policy, {})
    if not block_of(study.policy).startswith("outside."):
        block = given[block_of(study.policy)]
    return {p.name: block.get(p.name, p.default) for p in chosen}


def _search(
    study: Study,
    trace: Trace,
    start: Point,
    chosen: Sequence[Parameter],
    args: argparse.Namespace,
    err: Console,
) -> list[Tried]:
    tried: list[Tried] = []

    def scores(points: Sequence[Point]) -> list[float]:
        with mapped(partial(score, study, trace), points, args.jobs) as found:
            return list(found)

    try:
        for each in search(start, chosen, scores, args.trials):
            tried.append(each)
            best = best_of(tried)
            mark = "  best so far" if best is each and len(tried) > 1 else ""
            err.print(f"{len(tried)}/{args.trials}: {_words(each.point)}: {each.score:.3f} s{mark}")
    except KeyboardInterrupt:
        best_yet = _words(best_of(tried).point) if tried else "nothing was tried"
        raise KeyboardInterrupt(
            f"best of {len(tried)} until then, not compared on held-out sessions: {best_yet}"
        ) from None
    return tried


# -- what is printed -------------------------------------------------------------------------------------


def _plan(
    recording: Recording,
    study: Study,
    tuned_half: Trace,
    held_out: Trace,
    chosen: Sequence[Parameter],
    trials: int,
) -> str:
    left = [
        f"{number:,} {what}"
        for number, what in (
            (recording.refused, "refused"),
            (recording.without_policy, "without a policy"),
            (recording.too_long, "too long for the KV pool"),
        )
        if number
    ]
    return (
        f"{recording.turns:,} turns of {len(recording.sessions):,} sessions"
        + (f" (left out: {', '.join(left)})" if left else "")
        + f"; {study.deployment.name}, whose times are × {study.deployment.hardware.engine.scale:.2f}\n"
        f"searching {', '.join(p.name for p in chosen)} of {study.policy} on {tuned_half.requests:,} turns,"
        f" {held_out.requests:,} held out: at most {trials} points × {len(study.seeds)} seeds"
    )


def report(
    study: Study,
    recording: Recording,
    start: Point,
    best: Point,
    before: Waits,
    after: Waits,
    found: Mapping[str, Change],
) -> Iterator[Table | str]:
    """Yield what was found."""
    yield from _realism(recording, before)
    if best == start:
        yield f"\nNothing better was found for {study.policy} than what the pool has: {_words(start)}."
        return
    table = Table(title=f"SIMULATED · held-out sessions, {study.policy}", title_justify="left")
    for column in ("", "now", "tuned", "change", "95 % interval"):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in start.items():
        if best[name] != value:
            table.add_row(name, str(value), str(best[name]), "", "")
    for name, one in found.items():
        interval = f"{one.low:+.1%} to {one.high:+.1%}"
        table.add_row(f"{name}, s", f"{one.before:.3f}", f"{one.after:.3f}", f"{one.share:+.1%}", interval)
    if before.lost or after.lost:
        table.add_row("turns lost", str(before.lost), str(after.lost), "", "")
    yield table
    for waits, words in ((before, "now"), (after, "tuned")):
        if waits.faults:
            yield f"{study.policy} ({words}) failed {waits.faults:,} times, so these figures are not its own."
    yield verdict(found["TTFT mean" if study.objective is Objective.TTFT else "E2E mean"])
    yield "\n" + yaml(study.policy, {k: v for k, v in best.items() if v != start[k]})


def verdict(one: Change) -> str:
    """Return what the interval means."""
    if one.high < 0:
        return (
            f"Fairly sure: on sessions that the search never saw, the change is {one.share:+.1%}, and 95 % of"
            " the resampled sessions agree on its sign. Try it on a part of the traffic."
        )
    if one.low > 0:
        return "Worse on the held-out sessions: the search fitted chance. Keep what you have."
    return "Not sure: the interval contains no change at all. Keep what you have, or record more sessions."


def yaml(policy: str, values: Point) -> str:
    """Return the block for the pool document."""
    block = ", ".join(f"{name}: {value}" for name, value in values.items())
    if block_of(policy).startswith("outside."):
        inner = f"      outside:\n        {policy}: {{{block}}}"
    else:
        inner = f"      {block_of(policy)}: {{{block}}}"
    return f"spec:\n  routing:\n    policy:\n      name: {policy}\n{inner}"


def _realism(recording: Recording, before: Waits) -> Iterator[str]:
    """Yield how far the simulation is from what the log measured."""
    measured = sorted(recording.ttft_s)
    simulated = sorted(value for values in before.ttft_s.values() for value in values)
    for name, values in (("log, prefill ends", measured), ("simulated, first token", simulated)):
        if values:
            p50, p90 = quantile(values, 0.5), quantile(values, 0.9)
            yield f"{name}: p50 {p50:.3f} s, p90 {p90:.3f} s ({len(values):,} turns)"
    if not measured:
        yield "log: no engine told when prefills ended, so nothing says how far the simulation can be trusted"


def _words(point: Point) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.items())


def document(
    study: Study,
    recording: Recording,
    start: Point,
    best: Tried,
    found: Mapping[str, Change],
    tried: Sequence[Tried],
) -> dict[str, object]:
    """Return everything as plain values."""
    return {
        "schema": SCHEMA,
        "simulated": True,
        "policy": study.policy,
        "deployment": study.deployment.name,
        "objective": study.objective,
        "sessions": len(recording.sessions),
        "turns": recording.turns,
        "now": dict(start),
        "tuned": dict(best.point),
        "held_out": {
            name: {"now_s": c.before, "tuned_s": c.after, "change": c.share, "interval": [c.low, c.high]}
            for name, c in found.items()
        },
        "tried": [{"parameters": dict(each.point), "score_s": each.score} for each in tried],
    }


def _write(path: Path, values: dict[str, object], err: Console) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(values)) + b"\n")
    except OSError as error:
        raise SpecError(f"not written: {error} - at `--json`") from None
    err.print(f"report: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune tune",
        description="Find a policy's parameters on your pool's own decision log, in the simulator, and say\n"
        "what they would gain on sessions that the search never saw.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--log",
        "--decisions",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="of perilune-gateway --decision-log, plain or gzip; several in the order given",
    )
    add("--policy", metavar="NAME", help="whose parameters to find [the one that decided most of the log]")
    add(
        "--parameters",
        default="",
        metavar="A,B",
        help="only these of its parameters [all numbers and choices]",
    )
    add(
        "--objective",
        type=one_of(Objective),
        choices=list(Objective),
        default=Objective.TTFT,
        help="whose mean to make less: ttft, the time to the first token; e2e, to the last [%(default)s]",
    )
    add("--trials", type=count, default=TRIALS, metavar="N", help="most points to try [%(default)s]")
    add(
        "--turns",
        type=count,
        default=TURNS,
        metavar="N",
        help="most turns of each half; each point costs about 2 ms of CPU per turn and seed [%(default)s]",
    )
    add_runs(parser, SEEDS)
    return parser

"""The README.md of an evaluation: question, deployment, bars, findings, figures, tables and limits.

Everything comes from the findings except `notes.md` in the same folder, which people write: it explains why
bars are missed and which alternatives were measured. It is copied as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perilune_lab.traces.stats import Stats
from perilune_research.evaluate import plan, tables, text, thresholds
from perilune_research.evaluate.bars import Bar
from perilune_research.evaluate.document import Document
from perilune_research.evaluate.figures import FIGURES
from perilune_research.evaluate.findings import Findings

README, TABLES, NOTES = "README.md", "tables.md", "notes.md"

_TABLES_HEAD = """\
# Evaluation: tables

Everything on this page is **simulated**, and assumes engines that can pull KV from each other. The
[evaluation](README.md) explains the deployment, the loads and the metrics.
"""

_QUESTION = """\
## Question

Which routing policy gives agents the shortest time to first token, at which load, and what does it cost in
moves, unfairness between endpoints and time per output token? An agent sends its next turn as soon as the
answer to the last one has come, and each turn repeats the conversation so far, so a policy that loses a
session's KV cache pays with a long prefill, and every delay also delays the rest of the session.

Loads are given relative to R, the session rate at which raw `lmetric` has a TTFT p90 of five times the floor.
The **floor** is the TTFT of the same turns if each ran alone on an idle engine with its own session's prefix
cached; **regret** is TTFT p90 over that floor. **APC** is the share of prompt tokens served from prefix
cache, and its intra-session ceiling is the share that an infinite cache per session would serve.
**Stretch** is a session's duration over its ideal duration, and the **wall-clock factor** is the duration of
the whole replay over its ideal duration.
"""
_DEPLOYMENT = """\
## The deployment that is simulated

**The simulated engines can pull KV from each other** (`pullable`): a session that moves takes its KV along,
over links of the modelled fabric. No live pool does that today: a gateway never asks an engine to pull, so on
a live pool a move recomputes the prefix unless the engines share a store. Results for `perilune`, `ear`,
`mooncake` and `conductor` depend on this assumption. `python -m perilune_research simulate --no-pull` plays
the same policies without it, and [its result](#without-kv-transfer-as-on-live-pools-today) differs.
Lines and tables that name a *store* assume in addition that all engines read one shared KV store of 3 GB/s.

`static_pd` and `dynamo_disagg` prefill and decode on different endpoints. They exist in the simulator only.
"""
_LIMITS = """\
## Limits

- Engines, links and traffic are models. The engine model reproduces its measured H20 points within 10 %
  (P8), and `python -m perilune_research crosscheck` compares the simulator with the live gateway and
  simulated engines.
- One model size, one GPU type and one traffic generator are evaluated. Agents with other gaps, lengths or
  numbers of turns move R and may change the order of policies.
- Without KV transfer between engines, which is how live pools run today, only two loads are simulated.
- No client gives up and nothing is refused, so past saturation queues grow until the traffic ends.
"""


def readme(f: Findings, judged: Sequence[Bar], document: Document, trace: Stats, notes: str) -> str:
    parts = [
        _head(f, document),
        _QUESTION,
        _DEPLOYMENT,
        tables.setup(f, trace).markdown(),
        tables.bars(judged).markdown("##"),
        "\n".join(f"- {bar.name}, **{bar.verdict}**: {bar.goal}." for bar in judged) + "\n",
        text.found(f, judged),
    ]
    if notes:
        parts += ["## Why bars are missed, and what else was measured\n", notes.strip() + "\n"]
    parts += ["## Every policy at R\n", tables.end_to_end(f, "R").markdown()]
    parts += [f"Other loads, moves, SLO capacity and parameters: [{TABLES}]({TABLES}).\n"]
    parts += ["## Figures\n", *(_figure(name) for name in FIGURES)]
    return "\n".join([*parts, _LIMITS])


def all_tables(f: Findings) -> str:
    """The page of tables beside the README."""
    found = [
        *(tables.end_to_end(f, load) for load in plan.LOADS),
        *(tables.dominance(f, load) for load in plan.BAR_LOADS),
        tables.capacity(f),
        tables.migrations(f),
        tables.conductor(f),
        tables.decode_pools(f),
        tables.chatbot(f),
        thresholds.thresholds(f),
    ]
    return "\n".join([_TABLES_HEAD, *(table.markdown("##") for table in found)])


def _head(f: Findings, document: Document) -> str:
    size = f.size
    command = "python -m perilune_research evaluate" + (" --quick" if size.name == "quick" else "")
    if len(size.seeds) != (plan.QUICK_SEEDS if size.name == "quick" else plan.FULL_SEEDS):
        command += f" --seeds {len(size.seeds)}"
    if size.seeds[0] != 1:
        command += f" --seeds-from {size.seeds[0]}"
    lines = [
        "# Evaluation\n",
        "Everything on this page is **simulated**. No number is a measurement of hardware.\n",
        f"`{command}` makes this page, its figures and its data: `results.json` has the bars, and beside each"
        " figure stands a file with the values that it plots. All policies play the same sessions with seeds"
        f" {size.seeds[0]}–{size.seeds[-1]}. {len(size.side_seeds)} of these seeds serve P3, P4, the load"
        " 1.6 R, Conductor's arms, the chatbot control and the sensitivities. Brackets are 95 % intervals by"
        " bootstrap over seeds.",
    ]
    if document.compared:
        lines += ["", document.compared.agreement(document.bars)]
    return "\n".join(lines) + "\n"


def _figure(name: str) -> str:
    figure = FIGURES[name]
    return f"### {name}: {figure.title}\n\n![{name}, simulated]({name}.svg)\n\n{figure.caption}\n"


def notes_of(folder: Path) -> str:
    try:
        return (folder / NOTES).read_text()
    except FileNotFoundError:
        return ""

"""What the evaluation plays, as data: its sections, and the deployments that they play.

A section is a page with its data file under `docs/evaluation`. It has one or several plays: every one of some
deployments at every one of some loads with every one of some policies and seeds. Cells that several sections
share are played once.

R is one new session per second. There, `lmetric` has a TTFT p90 of sixteen times the floor in a pool with
defaults of eight endpoints, so that R loads such a pool fully.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from perilune_api.pool import MoveTrigger
from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.faults import Faults
from perilune_lab.traces.model import Mode
from perilune_research.evaluation import metrics
from perilune_research.evaluation.cells import Cell
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.traffic import GREEDY, PARAMETERS, QUIET

DEFAULT = "perilune"
"""The policy of a pool that names none."""
SYSTEMS = (
    DEFAULT,
    "lmetric_plus_one",
    "lmetric",
    "ear",
    "mooncake",
    "conductor",
    "dynamo",
    "llm_d",
    "sticky",
)
PLAIN = (
    *("dynamo_product", "dynamo_v1", "kv_linear"),
    *("least_loaded", "power_of_two", "round_robin", "random"),
)
"""Early versions of these systems, and policies that know no cache."""
EVERY = (*SYSTEMS, *PLAIN)
SCHEDULERS = (DEFAULT, "ear", "lmetric_plus_one", "sticky", "lmetric", "least_loaded")
"""Those whose coupling is compared."""
RIVALS = (DEFAULT, "lmetric_plus_one")

LOADS: Mapping[str, float] = {"R/2": 0.5, "R": 1.0, "1.25 R": 1.25, "1.6 R": 1.6}
THREE = ("R/2", "R", "1.25 R")
SPEEDS: Mapping[str, float] = {"half the speed": 0.5, "recorded speed": 1.0, "1.25 x the speed": 1.25}
"""Loads of recorded traffic."""
TRACES: Mapping[str, str] = {
    "conversation": "mooncake_conversation.jsonl.gz",
    "synthetic": "mooncake_synthetic.jsonl.gz",
}
"""The files of recorded traffic, which are no part of the repository."""


def rate(load: str) -> float:
    """Return the rate of a load: a name, or sessions per second as text."""
    named = {**LOADS, **SPEEDS}
    return named[load] if load in named else float(load)


# -- deployments -------------------------------------------------------------------------------------------


class Pool(NamedTuple):
    """A deployment, or the same with other traffic."""

    means: str
    changes: Mapping[str, Any]
    """Fields of a cell that differ from their defaults."""
    against: tuple[str, ...] = ()
    """Deployments that it is compared with."""


ARMS: Mapping[str, Pool] = {
    "none": Pool("a pool with defaults: what an engine does not hold, it computes", {}),
    "handoff": Pool(
        "engines hand KV over (`mooncake.transfer: handoff`) with requests", {"arm": Arm.HANDOFF}, ("none",)
    ),
    "store": Pool(
        "all engines share a store of 80 GiB for each GPU, 3 GB/s for each engine (`mooncake.store`)",
        {"arm": Arm.STORE},
        ("none",),
    ),
    "both": Pool("hand-off and store", {"arm": Arm.BOTH}, ("none",)),
    "split": Pool(
        "half of the endpoints only prefill, and hand KV over to the others", {"split": True}, ("none",)
    ),
    "split-store": Pool(
        "the same as `split`, and all engines share a store",
        {"split": True, "arm": Arm.STORE},
        ("split", "store"),
    ),
}
FAULTS: Mapping[str, tuple[str, Faults]] = {
    "told-double": (
        "prefill is believed to take twice as long as it does, step times are noisy",
        Faults(engine_belief=2.0, step_noise=0.2),
    ),
    "told-half": (
        "prefill is believed to take half as long as it does, step times are noisy",
        Faults(engine_belief=0.5, step_noise=0.2),
    ),
    "unequal": (
        "engines are up to 1.5 times as fast or slow as the gateway is told, noisy",
        Faults(speed_spread=1.5, step_noise=0.2),
    ),
    "very-unequal": (
        "engines are up to twice as fast or slow, believed to take half as long, noisier",
        Faults(speed_spread=2.0, step_noise=0.3, engine_belief=0.5),
    ),
}
"""How engines can differ from what the gateway believes, and the words that say it."""
LINKS: Mapping[str, tuple[str, Faults]] = {
    "fast-links": ("transfers take 0.4 times as long as believed", Faults(link_factor=0.4, link_belief=1.0)),
    "slow-links": ("transfers take 3 times as long as believed", Faults(link_factor=3.0, link_belief=1.0)),
    "crawling-links": (
        "transfers take 10 times as long as believed",
        Faults(link_factor=10.0, link_belief=1.0),
    ),
    "unsteady-links": (
        "one transfer in 20 takes 20 times as long",
        Faults(outlier_share=0.05, link_belief=1.0),
    ),
}
"""How links can differ from what the gateway believes at first, and the words that say it."""
NEVER = (("perilune.leastGainSeconds", "1e9"), ("perilune.leastGainWithKvSeconds", "1e9"))
"""Parameters with which no session leaves its host for being hot."""
FAIR = (("enginePriority.fairShare", "true"),)
FACTORS = (0.7, 1.3)


def _but(base: str, means: str, **changes: Any) -> Pool:
    """Return an arm with changes, which is compared with the arm."""
    return Pool(f"`{base}`, but {means}", {**ARMS[base].changes, **changes}, (base,))


PERSISTENT = 1_000
"""Retries of a client that comes back until it is served."""
ADMISSION: Mapping[str, tuple[str, float, int]] = {
    "": ("are refused, and their clients come back until they are served", 0.0, PERSISTENT),
    "-sdk": ("are refused, and their clients come back twice, as OpenAI's SDKs do", 0.0, 2),
    "-held": ("wait up to a minute (`maxWaitSeconds: 60`), and their clients come back twice", 60.0, 2),
}
"""What becomes of new sessions without room (`sessionAdmission`): the words that say it, for how many seconds
the gateway holds them, and retries of their clients."""
FOUR = "each request goes to one of four gateways by chance"
LONG = (("turns_alpha", 0.8),)
TENANTS = "two tenants send, one ten times as much as the other"


def _admitting(arm: str, suffix: str, means: str = "", **changes: Any) -> dict[str, Pool]:
    """Return the arm with these changes and session admission, which is compared with the one without."""
    return {
        f"{arm}{suffix}-admission{kind}": _but(
            arm,
            f"{means}new sessions without room {words}",
            admission=held_s,
            retries=retries,
            **changes,
        )._replace(against=(f"{arm}{suffix}",))
        for kind, (words, held_s, retries) in ADMISSION.items()
    }


POOLS: Mapping[str, Pool] = {
    **ARMS,
    "planned": _but(
        "handoff",
        "the gateway plans moves with every trigger (`migration.triggers`)",
        triggers=tuple(MoveTrigger),
    ),
    **{name: pool for arm in (*Arm, "split") for name, pool in _admitting(arm, "").items()},
    **{
        name: pool
        for arm in Arm
        for name, pool in _admitting(arm, "-four-gateways", f"{FOUR}, ", gateways=4).items()
    },
    "none-long": _but("none", "sessions have more turns", traffic=LONG),
    **_admitting("none", "-long", "sessions have more turns, ", traffic=LONG),
    "none-tenants": _but("none", TENANTS, tenants=(QUIET, GREEDY)),
    **_admitting("none", "-tenants", f"{TENANTS}, ", tenants=(QUIET, GREEDY)),
    **{f"{arm}-four-gateways": _but(arm, FOUR, gateways=4) for arm in (*Arm, "split")},
    **{
        f"{arm}-{name}-link": _but(arm, f"KV goes over {means}", link=name)
        for arm in ("handoff", "split")
        for name, means in {
            "loaded": "a loaded network: 0.3 s, and 3.5 GB/s",
            "best": "the fastest published link: 168 GB/s",
        }.items()
    },
    **{
        f"{arm}-{name}": _but(arm, means, faults=faults)
        for arm in (*Arm, "split")
        for name, (means, faults) in FAULTS.items()
    },
    **{
        f"{arm}-{name}": _but(arm, means, faults=faults)
        for arm in ("handoff", "both")
        for name, (means, faults) in LINKS.items()
    },
    **{
        f"{arm}-never": _but(arm, "no session moves to save time (`leastGainSeconds: 1e9`)", params=NEVER)
        for arm in (*Arm, "split")
    },
    **{
        f"{arm}-slower": _but(arm, "all engines compute 10 % slower", slower=1.1)
        for arm in ("none", "store", "split")
    },
    "conductor-no-scheduling": _but(
        "handoff",
        "the policy chooses by chance (`conductor.arm: no_scheduling`)",
        params=(("conductor.arm", "no_scheduling"),),
    ),
    "conductor-held": _but(
        "handoff",
        "a request is held for up to a second while its prefix is copied (`pull.maxSeconds: 1`)",
        params=(("pull.maxSeconds", "1"),),
    )._replace(against=("handoff", "conductor-no-scheduling")),
    "conductor-replicate": _but(
        "handoff",
        "the gateway copies prefixes with which many sessions begin (`migration.triggers: [replicate]`)",
        triggers=(MoveTrigger.DRAIN, MoveTrigger.REPLICATE),
    )._replace(against=("handoff", "conductor-no-scheduling")),
    **{
        f"{arm}-impatient": _but(
            arm, "clients close a request without a token after a minute, and try twice more", patience_s=60.0
        )
        for arm in ("none", "store", "split")
    },
    "beginnings-refused": _but(
        "none",
        "a session's first request is refused if no endpoint has time within 10 s",
        begin_within_s=10.0,
    ),
    "all-refused": _but(
        "none",
        "any request is refused if no endpoint has time within 10 s (`limits.ttftSloSeconds: 10`)",
        params=(("limits.ttftSloSeconds", "10"),),
    ),
    **{
        f"{arm}-headers": Pool(
            f"`{arm}`, sessions whose bodies are hard to guess, each turn decided twice",
            {**ARMS[arm].changes, "twice": True, "faults": Faults(token_error=0.3)},
        )
        for arm in ("none", "handoff", "store")
    },
    "split-overlap": _but(
        "split", "transfers overlap with prefills: a model, which vLLM is not", overlap=True
    ),
    **{
        f"{prefix}{name}": Pool(
            f"{means}{words}",
            {
                "tenants": who,
                **changes,
                "admission": 60.0 if fair else None,
                "params": FAIR if fair else (),
            },
            tuple(f"{prefix}{other}" for other in against),
        )
        for prefix, words, changes in (
            ("", "", {}),
            ("four-", ", one of four gateways by chance", {"gateways": 4}),
            ("capped-", ", a prompt gets 2,048 tokens of a step at most", {"tokens_per_prompt": 2048}),
        )
        for name, means, who, fair, against in (
            ("alone", "the smaller tenant alone, with fair shares", (QUIET,), True, ()),
            ("in-turn", "both tenants, in turn", (QUIET, GREEDY), False, ("alone",)),
            ("fair", "both tenants, with fair shares", (QUIET, GREEDY), True, ("alone", "in-turn")),
        )
    },
    **{
        f"{arm}-{parameter}-{factor}": _but(arm, f"{means} times {factor}", traffic=((parameter, factor),))
        for arm in ("none", "store", "split")
        for parameter, means in PARAMETERS.items()
        for factor in FACTORS
    },
    **{
        f"{name}-{arm}{suffix}": Pool(
            f"`{arm}`, the requests of {file}, {words}",
            {**ARMS[arm].changes, "trace": file, "mode": mode},
            () if arm == "none" else (f"{name}-none{suffix}",),
        )
        for name, file in TRACES.items()
        for arm in ("none", "handoff", "store", "both", "split")
        for suffix, mode, words in (
            ("", Mode.THINKTIME, "each when the one before it in its session has ended (mode thinktime)"),
            ("-timed", Mode.TIMESTAMPS, "each at its recorded time (mode timestamps)"),
        )
    },
}


# -- sections ----------------------------------------------------------------------------------------------


def seeds(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


class Play(NamedTuple):
    """All of these deployments, at all of these loads, with all of these policies and seeds."""

    pools: Sequence[str]
    loads: Sequence[str]
    policies: Sequence[str]
    seeds: Sequence[int]


BASE = Cell(policy=DEFAULT, rate=1.0, seed=1)
SHORT = replace(BASE, window_s=900.0, warmup_s=300.0)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One page and its data."""

    name: str
    """Name of the page, of its data, and of the section in the command."""
    title: str
    plays: tuple[Play, ...]
    base: Cell = BASE
    """The cell that deployments, loads, policies and seeds change."""
    shown: tuple[Metric, ...] = metrics.MAIN
    """Figures of its tables."""
    compared: tuple[Metric, ...] = (metrics.TTFT_P90,)
    """Figures in which a deployment is compared with others, and a policy with the default."""
    paired: tuple[Metric, ...] = ()
    """Figures in which a deployment is compared with others seed by seed, by median and worst."""
    told: tuple[str, ...] = ()
    """Headings of docs/evaluation, mostly of README.md, that tell what follows from it."""
    apart: bool = False
    """Whether each deployment and load has a table of its own, and the default is held against its goals."""
    searched: bool = False
    """Whether the load is searched that each policy serves, see `capacity.py`. Then it has no loads."""
    note: str = ""
    """What else a reader of the figures needs to know."""
    traces: Path = Path()
    """Folder of the files of recorded traffic."""
    small: bool = False
    """Whether `quick` made it."""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pool for play in self.plays for pool in play.pools))

    @property
    def loads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(load for play in self.plays for load in play.loads))

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(policy for play in self.plays for policy in play.policies))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for play in self.plays for seed in play.seeds}))

    @property
    def recorded(self) -> bool:
        """Whether it needs the files of recorded traffic."""
        return any("trace" in POOLS[pool].changes for pool in self.pools)

    def cell(self, pool: str, load: str, policy: str, seed: int) -> Cell:
        changes = dict(POOLS[pool].changes)
        if "trace" in changes:
            changes["trace"] = str(self.traces / changes["trace"])
        return replace(self.base, policy=policy, rate=rate(load), seed=seed, **changes)

    def cells(self) -> Iterable[Cell]:
        """Yield all its cells, those of one seed before those of the next; some more than once."""
        for seed in self.seeds:
            for play in self.plays:
                if seed in play.seeds:
                    for pool, load, policy in product(play.pools, play.loads, play.policies):
                        yield self.cell(pool, load, policy, seed)


_THREE_SEEDS, _SIXTEEN = seeds(1, 3), seeds(1, 16)
_HELD_BACK = seeds(1001, 1016)


def _more(sample: Sequence[int]) -> tuple[Play, ...]:
    """Return the plays of the default and its closest rivals in each arm, at R."""
    return (
        Play(("none", "store"), ("R",), RIVALS, sample),
        Play(("none",), ("R",), ("kv_linear", "lmetric"), sample),
        Play(("store",), ("R",), ("dynamo_product",), sample),
    )


_REFUSED = ("-admission", "-admission-sdk")
_IN_NONE = ("none-four-gateways", "none-long", "none-tenants")
_ADMISSION: Mapping[str, Any] = {
    "shown": (
        *(metrics.TTFT_P90, metrics.LATER_TTFT_P90, metrics.OUTPUT),
        *(metrics.SESSION_P90, metrics.SESSION_P99, metrics.LOST, metrics.REFUSED),
    ),
    "compared": (),
    "paired": (metrics.OUTPUT, metrics.SESSION_P90, metrics.SESSION_P99, metrics.LATER_TTFT_P90),
    "told": ("Session admission",),
    "note": "TTFT of a session's first turn counts from its first request, so it includes waiting and"
    " refusals; later turns never wait. *Session* is from the first request to the last token, of all"
    " sessions that came after the warm-up, where one that was given up never ends.",
}

SECTIONS: tuple[Section, ...] = (
    Section(
        name="admission",
        title="session admission",
        plays=(
            Play(
                ("none", *(f"none-admission{kind}" for kind in ADMISSION)),
                tuple(LOADS),
                (DEFAULT,),
                _SIXTEEN,
            ),
        ),
        **_ADMISSION,
    ),
    Section(
        name="admission-elsewhere",
        title="session admission in other arms, with four gateways, longer sessions, or two tenants",
        plays=(
            Play(
                [
                    f"{base}{kind}"
                    for base in ("handoff", "store", "both", *_IN_NONE)
                    for kind in ("", "-admission")
                ],
                ("R", "1.25 R", "1.6 R"),
                (DEFAULT,),
                _SIXTEEN,
            ),
        ),
        base=SHORT,
        **_ADMISSION,
    ),
    Section(
        name="admission-at-r",
        title="session admission up to full load",
        plays=(
            Play(
                [f"{arm}{kind}" for arm in ("handoff", "store", "both") for kind in ("", *_REFUSED)],
                ("R",),
                (DEFAULT,),
                _SIXTEEN,
            ),
            Play(
                [
                    f"{base}{kind}"
                    for base in ("handoff", "store", "both", *_IN_NONE)
                    for kind in ("", "-admission")
                ],
                ("R/2",),
                (DEFAULT,),
                _THREE_SEEDS,
            ),
        ),
        **_ADMISSION,
    ),
    Section(
        name="never-moving",
        title="sessions that never move to save time",
        plays=(
            Play(
                ("none", "none-never", "handoff", "handoff-never", "store", "store-never"),
                ("R",),
                (DEFAULT,),
                _SIXTEEN,
            ),
        ),
        shown=(*metrics.MAIN[:-1], metrics.MOVED),
        told=("What moving is worth", "Goals"),
    ),
    Section(
        name="conductor",
        title="Conductor's variants",
        plays=(
            Play(
                ("none", "handoff", "conductor-no-scheduling", "conductor-held", "conductor-replicate"),
                ("R/2", "R"),
                ("conductor",),
                _THREE_SEEDS,
            ),
            Play(("handoff",), ("R/2", "R"), ("least_loaded",), _THREE_SEEDS),
        ),
        shown=(metrics.TTFT_MEAN, metrics.TTFT_P90, metrics.APC, metrics.OUTPUT, metrics.VARIANCE),
        compared=(metrics.TTFT_MEAN,),
        told=("Claims of others",),
    ),
    Section(
        name="triggers",
        title="how often a host is hot",
        plays=(Play(("none", "handoff", "store"), tuple(LOADS), (DEFAULT, "ear", "sticky"), _THREE_SEEDS),),
        shown=(metrics.HOT, metrics.MOVED, metrics.TTFT_P90),
        compared=(),
        told=("How often a host is hot",),
        note="*Host was hot* is the share of all decisions that found the session's host with more queued"
        " prefill than T_hot (`ear.hotPendingTokens`), whatever the policy did then: with a move, for lack"
        " of another endpoint, or in spite of it.",
    ),
    Section(
        name="deployments",
        title="deployments",
        plays=(
            Play(("none", "store"), THREE, EVERY, _THREE_SEEDS),
            Play(("handoff", "both"), THREE, SYSTEMS, _THREE_SEEDS),
            Play(("split",), THREE, (DEFAULT, "least_loaded"), _THREE_SEEDS),
        ),
        apart=True,
        told=(
            *("Arm none", "Arm handoff", "Arm store", "Arm both"),
            *("In short", "Where the default loses", "Goals", "Claims of others"),
        ),
    ),
    Section(
        name="more-seeds",
        title="sixteen seeds",
        plays=(*_more(_SIXTEEN), Play(("handoff", "both"), ("R",), (*RIVALS, "llm_d"), _SIXTEEN)),
        shown=(*metrics.MAIN, metrics.WALL_CLOCK),
        apart=True,
        told=("Sixteen seeds", "Goals"),
    ),
    Section(
        name="held-back-seeds",
        title="sixteen seeds that no rule was chosen by",
        plays=_more(_HELD_BACK),
        shown=(*metrics.MAIN, metrics.WALL_CLOCK),
        apart=True,
        told=("Sixteen seeds",),
    ),
    Section(
        name="separate-prefill",
        title="separate prefill",
        plays=(
            Play(("split",), ("R/2", "R"), (*SYSTEMS, "least_loaded"), _THREE_SEEDS),
            Play(("split-store",), ("R/2", "R"), (*RIVALS, "least_loaded"), _THREE_SEEDS),
            Play(("none", "store"), ("R/2", "R"), (DEFAULT,), _THREE_SEEDS),
        ),
        shown=(*metrics.MAIN, metrics.INTERFERENCE),
        apart=True,
        told=("Separate prefill", "Other pools", "Claims of others"),
    ),
    Section(
        name="separate-prefill-elsewhere",
        title="separate prefill with other gateways, engines and settings",
        plays=(
            Play(("split",), ("R/2", "0.64", "R"), (DEFAULT, "ear", "sticky"), _THREE_SEEDS),
            Play(
                [f"split-{other}" for other in ("four-gateways", "never", "slower", "admission")],
                ("R/2", "0.64", "R"),
                (DEFAULT,),
                _THREE_SEEDS,
            ),
            Play([f"split-{name}" for name in FAULTS], ("0.64", "R"), (DEFAULT,), _THREE_SEEDS),
        ),
        shown=(
            *(metrics.TTFT_P50, metrics.TTFT_P90, metrics.E2E_P90, metrics.APC, metrics.OUTPUT),
            *(metrics.WORST, metrics.IN_FLIGHT, metrics.HOT, metrics.MOVED, metrics.REFUSED, metrics.LOST),
        ),
        compared=(metrics.TTFT_P90, metrics.IN_FLIGHT),
        told=("Separate prefill",),
        note="At 0.64 sessions/s `split` is fully loaded ([capacity](capacity.md)). *Host was hot* is told"
        " under [how often a host is hot](triggers.md).",
    ),
    Section(
        name="other-pools",
        title="other pools",
        plays=(
            Play(("none", "handoff", "store", "both", "split"), THREE, (DEFAULT,), _THREE_SEEDS),
            Play(("planned", "none-admission-held", "split-store"), THREE, (DEFAULT,), _THREE_SEEDS),
            Play([f"{arm}-four-gateways" for arm in Arm], THREE, (DEFAULT,), _THREE_SEEDS),
            Play(
                [f"{arm}-{link}-link" for arm in ("handoff", "split") for link in ("loaded", "best")],
                ("R",),
                (DEFAULT,),
                _THREE_SEEDS,
            ),
        ),
        told=("Other pools",),
    ),
    Section(
        name="recorded",
        title="recorded traffic",
        plays=(
            Play(
                [f"{trace}-{arm}" for trace in TRACES for arm in ("none", "store")],
                tuple(SPEEDS),
                EVERY,
                (1,),
            ),
            Play(
                [f"{trace}-{arm}" for trace in TRACES for arm in ("handoff", "both", "split")],
                tuple(SPEEDS),
                (*RIVALS, "ear", "sticky"),
                (1,),
            ),
            Play(
                [f"{trace}-{arm}-timed" for trace in TRACES for arm in ("none", "store")],
                ("recorded speed",),
                (*RIVALS, "ear", "sticky"),
                (1,),
            ),
        ),
        told=("Recorded traffic",),
        note="A trace is played once, so no figure has an interval.",
    ),
    Section(
        name="beliefs",
        title="engines and links that differ from the belief",
        plays=(
            Play(("none", "store", "handoff", "both"), ("R",), (*RIVALS, "ear"), _THREE_SEEDS),
            Play([f"{arm}-{name}" for arm in Arm for name in FAULTS], ("R",), (*RIVALS, "ear"), _THREE_SEEDS),
            Play(
                [f"{arm}-{name}" for arm in ("handoff", "both") for name in LINKS],
                ("R",),
                (DEFAULT,),
                _THREE_SEEDS,
            ),
        ),
        told=("Engines that differ from the belief", "Other pools"),
    ),
    Section(
        name="giving-up",
        title="clients that give up",
        plays=(
            Play(
                ("none", "none-impatient", "store", "store-impatient"),
                ("R", "1.25 R"),
                (*RIVALS, "round_robin"),
                _THREE_SEEDS,
            ),
            Play(("split", "split-impatient"), ("R", "1.25 R"), (DEFAULT, "least_loaded"), _THREE_SEEDS),
        ),
        shown=(
            *(metrics.CLOSED, metrics.LOST, metrics.ANSWERED),
            *(metrics.TTFT_P50, metrics.TTFT_P90_OF_ALL, metrics.E2E_P90, metrics.OUTPUT),
        ),
        compared=(metrics.TTFT_P90_OF_ALL,),
        told=("Clients that give up",),
    ),
    Section(
        name="early-rejection",
        title="early rejection",
        plays=(
            Play(
                ("none", "beginnings-refused", "all-refused"), ("1.25 R", "1.6 R"), (DEFAULT,), _THREE_SEEDS
            ),
        ),
        shown=(
            *(metrics.LOST, metrics.ANSWERED, metrics.TTFT_P50, metrics.TTFT_P90_OF_ALL),
            *(metrics.E2E_P90, metrics.OUTPUT, metrics.APC),
        ),
        compared=(metrics.OUTPUT,),
        told=("Early rejection",),
    ),
    Section(
        name="overlap",
        title="overlapped transfers",
        plays=(Play(("split", "split-overlap"), ("R/2", "R"), (DEFAULT,), _THREE_SEEDS),),
        shown=(*(metrics.WAITS_FOR_KV, metrics.TTFT_P50, metrics.TTFT_P90, metrics.E2E_P90, metrics.OUTPUT),),
        compared=(metrics.TTFT_P50, metrics.TTFT_P90),
        told=("Overlapped transfers",),
        note="*Waits for KV* is the mean time from a prompt's prefill to its KV's arrival.",
    ),
    Section(
        name="gateways",
        title="four gateways in place of one",
        plays=(
            Play(
                [f"{arm}{several}" for arm in ("none", "store") for several in ("", "-four-gateways")],
                ("0.25", "0.4"),
                (DEFAULT,),
                seeds(1, 8),
            ),
        ),
        base=replace(BASE, endpoints=4, window_s=400.0, warmup_s=60.0),
        told=("Four gateways in place of one",),
    ),
    Section(
        name="fairness",
        title="a tenant at ten times its share",
        plays=(
            Play(("alone", "in-turn", "fair"), ("0.69", "0.88"), (DEFAULT,), _THREE_SEEDS),
            Play(("four-alone", "four-in-turn", "four-fair"), ("0.88",), (DEFAULT,), _THREE_SEEDS),
            Play(
                ("capped-alone", "capped-in-turn", "capped-fair"), ("0.69", "0.88"), (DEFAULT,), _THREE_SEEDS
            ),
        ),
        base=replace(SHORT, endpoints=4),
        shown=(metrics.QUIET_TTFT_P90, metrics.OUTPUT, metrics.LOST),
        compared=(metrics.QUIET_TTFT_P90, metrics.OUTPUT),
        told=("A tenant at ten times its share",),
        note="Loads are the sessions per second of both tenants together, of which the smaller one sends an"
        " eleventh, even if it is alone. Output is that of all tenants that send. Goals: the smaller one's"
        " TTFT p90 at most 1.3 times that alone, and at least 0.98 of the output in turn.",
    ),
    Section(
        name="coupling",
        title="what slower engines do to the number of turns in flight",
        plays=(
            Play(("none", "none-slower"), tuple(LOADS), SCHEDULERS, _THREE_SEEDS),
            Play(("store", "store-slower"), tuple(LOADS), RIVALS, _THREE_SEEDS),
        ),
        shown=(metrics.TURN_MEAN, metrics.IN_FLIGHT, metrics.WALL_CLOCK, metrics.TTFT_P90),
        compared=(metrics.IN_FLIGHT,),
        told=("Engines that differ from the belief",),
        note="Sessions begin at the same rate whatever the speed, so slower turns are more turns in"
        " flight, which make turns slower. With engines that are 10 % slower, 1.1 times as many turns in"
        " flight are no such coupling, and 1.1 to the power of A times as many are an amplification of A.",
    ),
    Section(
        name="heat",
        title="what waits at each endpoint",
        plays=(
            Play(
                ("none", "store"),
                ("R",),
                (DEFAULT, "ear", "sticky", "lmetric_plus_one", "lmetric"),
                _THREE_SEEDS,
            ),
        ),
        shown=(*metrics.HEAT, metrics.WORST),
        compared=(),
        told=("What waits at each endpoint",),
        note="*Pending tokens* are the uncached tokens of prompts that wait or are computed, averaged over"
        " time; *time hot* is the share of it with more of them than T_hot. Endpoints are ranked in each"
        " play, and the figures of a rank are averaged over the seeds.",
    ),
    Section(
        name="headers",
        title="decisions from headers",
        plays=(
            Play(
                ("none-headers", "handoff-headers", "store-headers"),
                THREE,
                (DEFAULT, "ear", "sticky"),
                _THREE_SEEDS,
            ),
        ),
        shown=(metrics.DECIDED, metrics.READ, metrics.EQUAL, metrics.SAME),
        compared=(),
        told=("Decisions from headers",),
        note="Some sessions leave reasoning out of later prompts, send side requests under their own name,"
        " have sub-agents or the name of an earlier session; their bytes per token differ by up to 30 %"
        " from what the gateway expects. Each turn of a session with a host is decided twice on the same"
        " state, by its headers and by its body. The goal is the same endpoint for 99.9 % of all turns, of"
        " which those whose body is read cannot differ.",
    ),
    Section(
        name="capacity",
        title="capacity",
        plays=(
            Play(("none", "store"), (), (*RIVALS, "dynamo", "sticky", "round_robin"), _THREE_SEEDS),
            Play(("handoff", "both"), (), RIVALS, _THREE_SEEDS),
            Play(("split",), (), (DEFAULT, "least_loaded"), _THREE_SEEDS),
        ),
        base=SHORT,
        searched=True,
        told=("Capacity",),
    ),
    Section(
        name="sensitivity",
        title="other traffic",
        plays=(
            *(
                Play(
                    (arm, *(f"{arm}-{parameter}-{factor}" for parameter in PARAMETERS for factor in FACTORS)),
                    ("R",),
                    policies,
                    seeds(1, 2),
                )
                for arm, policies in (
                    ("none", (*RIVALS, "sticky")),
                    ("store", (*RIVALS, "sticky")),
                    ("split", (DEFAULT,)),
                )
            ),
        ),
        base=SHORT,
        shown=(metrics.TTFT_P50, metrics.TTFT_P90, metrics.E2E_P90, metrics.APC),
        told=("Other generated traffic",),
        note="Sessions start at the same times in all of them, so longer prompts are more load.",
    ),
    Section(
        name="more-loads",
        title="sixteen seeds at other loads",
        plays=(
            Play(("none", "store", "handoff", "both"), ("R/2", "1.25 R"), (*RIVALS, "llm_d"), _SIXTEEN),
            Play(("store", "both"), ("R/2", "1.25 R"), ("dynamo_product", "mooncake"), _SIXTEEN),
            Play(("store", "both"), ("1.25 R",), ("lmetric",), _SIXTEEN),
        ),
        apart=True,
        told=("Sixteen seeds",),
    ),
)
"""All sections, the most telling first."""


# -- smaller -----------------------------------------------------------------------------------------------


_MOST_POOLS = 6


def quick(section: Section) -> Section:
    """Return a section of a few minutes: a third of the traffic, one seed, one load, and the first of
    deployments and policies."""
    plays = tuple(
        Play(
            play.pools[:_MOST_POOLS],
            [load for load in play.loads if load in ("R", "recorded speed")] or play.loads[:1],
            play.policies[:2],
            play.seeds[:1],
        )
        for play in section.plays[:3]
    )
    base = section.base
    limit = 1_000 if section.recorded else None
    smaller = replace(base, window_s=base.window_s / 3, warmup_s=base.warmup_s / 3, limit=limit)
    return replace(section, plays=plays, base=smaller, small=True)

"""The sections of the evaluation, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perilune_lab.simulate.deployment import Arm
from perilune_research.evaluation import metrics
from perilune_research.evaluation.plan import BASE, DEFAULT, LOADS, SHORT, SPEEDS, THREE, Play, Section, seeds
from perilune_research.evaluation.pools import ADMISSION, ARMS, FACTORS, FAULTS, LINKS, SPLIT, TRACES, VARIED

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

_THREE_SEEDS, _SIXTEEN = seeds(1, 3), seeds(1, 16)
_HELD_BACK = seeds(1001, 1016)


def _more(sample: Sequence[int]) -> tuple[Play, ...]:
    """Return the plays of the default and its closest rivals in each arm, at R."""
    return (
        Play(tuple(ARMS), ("R",), RIVALS, sample),
        Play(("none",), ("R",), ("kv_linear", "lmetric"), sample),
        Play(("store", "both"), ("R",), ("dynamo_product",), sample),
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
                [f"{arm}{kind}" for arm in SPLIT for kind in ("", "-admission")], ("R",), (DEFAULT,), _SIXTEEN
            ),
            Play(
                [
                    f"{base}{kind}"
                    for base in ("handoff", "store", "both", *SPLIT, *_IN_NONE)
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
                [f"{arm}{kind}" for arm in ARMS for kind in ("", "-never")],
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
        plays=(
            Play(("none", "handoff", "store"), tuple(LOADS), (DEFAULT, "ear", "sticky"), _THREE_SEEDS),
            Play(SPLIT, THREE, (DEFAULT, "ear", "sticky"), _THREE_SEEDS),
        ),
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
        plays=(
            *_more(_SIXTEEN),
            Play(("handoff", "both"), ("R",), ("llm_d",), _SIXTEEN),
            Play(SPLIT, ("R",), ("lmetric",), _SIXTEEN),
        ),
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
            Play(SPLIT, THREE, (*SYSTEMS, "least_loaded"), _THREE_SEEDS),
            Play(("none", "store"), THREE, (DEFAULT,), _THREE_SEEDS),
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
            Play(("split-store",), ("R/2", "R"), (DEFAULT, "ear", "sticky"), _THREE_SEEDS),
            Play(
                [
                    f"split-store-{other}"
                    for other in ("four-gateways", "never", "slower", "admission", *FAULTS)
                ],
                ("R/2", "R"),
                (DEFAULT,),
                _THREE_SEEDS,
            ),
        ),
        shown=(
            *(metrics.TTFT_P50, metrics.TTFT_P90, metrics.E2E_P90, metrics.APC, metrics.OUTPUT),
            *(metrics.WORST, metrics.IN_FLIGHT, metrics.HOT, metrics.MOVED, metrics.REFUSED, metrics.LOST),
        ),
        compared=(metrics.TTFT_P90, metrics.IN_FLIGHT),
        told=("Separate prefill",),
        note="At 0.64 sessions/s the default has a TTFT p90 of 5 s in `split`, which is the bound of"
        " [capacity](capacity.md). *Host was hot* is told"
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
                [f"{trace}-{arm}" for trace in TRACES for arm in ("handoff", "both", *SPLIT)],
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
            Play(tuple(ARMS), ("R",), (*RIVALS, "ear"), _THREE_SEEDS),
            Play(
                [f"{arm}-{name}" for arm in ARMS for name in FAULTS], ("R",), (*RIVALS, "ear"), _THREE_SEEDS
            ),
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
            Play(
                [f"{arm}{kind}" for arm in SPLIT for kind in ("", "-impatient")],
                ("R", "1.25 R"),
                (DEFAULT, "least_loaded"),
                _THREE_SEEDS,
            ),
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
                ("none", "none-beginnings-refused", "none-all-refused"),
                ("1.25 R", "1.6 R"),
                (DEFAULT,),
                _THREE_SEEDS,
            ),
            Play(
                [f"{arm}{kind}" for arm in SPLIT for kind in ("", "-beginnings-refused", "-all-refused")],
                ("R", "1.25 R"),
                (DEFAULT,),
                _THREE_SEEDS,
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
        name="gateways-at-r",
        title="four gateways in place of one, up to full load",
        plays=(
            Play(
                [f"{arm}{several}" for arm in Arm for several in ("", "-four-gateways")],
                ("R", "1.25 R"),
                (DEFAULT,),
                _SIXTEEN,
            ),
            Play(
                [f"{arm}{several}" for arm in SPLIT for several in ("", "-four-gateways")],
                ("R",),
                (DEFAULT,),
                _SIXTEEN,
            ),
        ),
        paired=(metrics.TTFT_P90, metrics.E2E_P90, metrics.OUTPUT),
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
            Play(("split-alone", "split-in-turn", "split-fair"), ("0.69",), (DEFAULT,), _THREE_SEEDS),
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
            Play(
                [f"{arm}{kind}" for arm in SPLIT for kind in ("", "-slower")], THREE, (DEFAULT,), _THREE_SEEDS
            ),
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
                ("none", "store", *SPLIT),
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
            Play(
                ("split-headers", "split-store-headers"),
                ("R/2", "R"),
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
            Play(SPLIT, (), (*RIVALS, "least_loaded"), _THREE_SEEDS),
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
                    (arm, *(f"{arm}-{parameter}-{factor}" for parameter in VARIED for factor in FACTORS)),
                    ("R",),
                    (*RIVALS, "sticky"),
                    seeds(1, 2),
                )
                for arm in ("none", "store", *SPLIT)
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
            Play(SPLIT, ("R/2",), (*RIVALS, "ear"), _SIXTEEN),
            Play(("split-store",), ("R/2",), ("lmetric",), _SIXTEEN),
            Play(SPLIT, ("1.25 R",), (DEFAULT, "lmetric"), _SIXTEEN),
        ),
        apart=True,
        told=("Sixteen seeds",),
    ),
)
"""All sections, the most telling first."""

"""The deployments that the evaluation plays, as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from perilune_api.pool import MoveTrigger
from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.faults import Faults
from perilune_lab.traces.model import Mode
from perilune_research.evaluation.traffic import GREEDY, QUIET

TRACES: Mapping[str, str] = {
    "conversation": "mooncake_conversation.jsonl.gz",
    "synthetic": "mooncake_synthetic.jsonl.gz",
}
"""The files of recorded traffic, which are no part of the repository."""


class Pool(NamedTuple):
    """A deployment, or the same with other traffic."""

    differs: tuple[str, ...]
    """What it has that `like` has not, in words."""
    changes: Mapping[str, Any]
    """Fields of a cell that differ from their defaults."""
    against: tuple[str, ...] = ()
    """Deployments that it is compared with."""
    like: str = ""
    """The deployment that it is otherwise. Empty: `differs` says all."""


ARMS: Mapping[str, Pool] = {
    "none": Pool(("a pool with defaults: what an engine does not hold, it computes",), {}),
    "handoff": Pool(
        ("engines hand KV over (`mooncake.transfer: handoff`) with requests",),
        {"arm": Arm.HANDOFF},
        ("none",),
        "none",
    ),
    "store": Pool(
        ("all engines share a store of 80 GiB for each GPU, 3 GB/s for each engine (`mooncake.store`)",),
        {"arm": Arm.STORE},
        ("none",),
        "none",
    ),
    "both": Pool(("hand-off and store",), {"arm": Arm.BOTH}, ("none",), "none"),
    "split": Pool(
        ("half of the endpoints only prefill, and hand KV over to the others",),
        {"split": True},
        ("none",),
        "none",
    ),
    "split-store": Pool(
        ("all engines share a store",),
        {"split": True, "arm": Arm.STORE},
        ("split", "store"),
        "split",
    ),
}
SPLIT = ("split", "split-store")
"""The pools in which half of the endpoints only prefill, without and with a store."""
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
        "engines are up to 1.5 times as fast or slow as an H20, noisy",
        Faults(speed_spread=1.5, step_noise=0.2),
    ),
    "very-unequal": (
        "engines are up to twice as fast or slow as an H20, believed to take half as long, noisier",
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


def _but(base: str, *differs: str, **changes: Any) -> Pool:
    """Return an arm with changes, which is compared with the arm."""
    return Pool(differs, {**ARMS[base].changes, **changes}, (base,), base)


PERSISTENT = 1_000
"""Retries of a client that comes back until it is served."""
ADMISSION: Mapping[str, tuple[str, float, int]] = {
    "": (
        "new sessions without room are refused, and their clients come back until they are served",
        0.0,
        PERSISTENT,
    ),
    "-sdk": (
        "new sessions without room are refused, and their clients come back twice, as OpenAI's SDKs do",
        0.0,
        2,
    ),
    "-held": (
        "new sessions without room wait up to a minute (`maxWaitSeconds: 60`), and their clients come back"
        " twice",
        60.0,
        2,
    ),
}
"""What becomes of new sessions without room (`sessionAdmission`): the words that say it, for how many seconds
the gateway holds them, and retries of their clients."""
FOUR = "each request goes to one of four gateways by chance"
LONG = (("turns_alpha", 0.8),)
VARIED: Mapping[str, str] = {
    "turns_alpha": "the shape of the number of turns is {} times as large (a larger one means fewer turns)",
    "first_prompt": "first prompts have {} times as many tokens",
    "tool_result": "tool results have {} times as many tokens",
    "answer": "answers have {} times as many tokens",
    "compacted_share": "compaction leaves {} times as much of a context",
    "same_task_share": "{} times as many sessions begin with the same task",
    "gap_scale": "the gaps between turns are {} times as long",
    "system_prompts": "there are {} times as many system prompts",
    "system_tokens": "system prompts are {} times as long",
}
"""What it means that a parameter of the generator is so many times its default."""
TENANTS = "two tenants send, one ten times as much as the other"


def _admitting(arm: str, suffix: str, **changes: Any) -> dict[str, Pool]:
    """Return the deployment `arm` + `suffix`, which has these changes, with session admission. It is compared
    with the one without."""
    base = f"{arm}{suffix}"
    return {
        f"{base}-admission{kind}": _but(arm, words, admission=held_s, retries=retries, **changes)._replace(
            against=(base,), like=base
        )
        for kind, (words, held_s, retries) in ADMISSION.items()
    }


POOLS: Mapping[str, Pool] = {
    **ARMS,
    "planned": _but(
        "handoff",
        "the gateway plans moves with every trigger (`migration.triggers`)",
        triggers=tuple(MoveTrigger),
    ),
    **{name: pool for arm in ARMS for name, pool in _admitting(arm, "").items()},
    **{name: pool for arm in Arm for name, pool in _admitting(arm, "-four-gateways", gateways=4).items()},
    "none-long": _but("none", "sessions have more turns", traffic=LONG),
    **_admitting("none", "-long", traffic=LONG),
    "none-tenants": _but("none", TENANTS, tenants=(QUIET, GREEDY)),
    **_admitting("none", "-tenants", tenants=(QUIET, GREEDY)),
    **{f"{arm}-four-gateways": _but(arm, FOUR, gateways=4) for arm in ARMS},
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
        for arm in ARMS
        for name, (means, faults) in FAULTS.items()
    },
    **{
        f"{arm}-{name}": _but(arm, means, faults=faults)
        for arm in ("handoff", "both")
        for name, (means, faults) in LINKS.items()
    },
    **{
        f"{arm}-never": _but(arm, "no session moves to save time (`leastGainSeconds: 1e9`)", params=NEVER)
        for arm in ARMS
    },
    **{
        f"{arm}-slower": _but(arm, "all engines compute 10 % slower", slower=1.1)
        for arm in ("none", "store", *SPLIT)
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
        for arm in ("none", "store", *SPLIT)
    },
    **{
        f"{arm}-beginnings-refused": _but(
            arm,
            "a session's first request is refused if no endpoint has time within 10 s",
            begin_within_s=10.0,
        )
        for arm in ("none", *SPLIT)
    },
    **{
        f"{arm}-all-refused": _but(
            arm,
            "any request is refused if no endpoint has time within 10 s (`limits.ttftSloSeconds: 10`)",
            params=(("limits.ttftSloSeconds", "10"),),
        )
        for arm in ("none", *SPLIT)
    },
    **{
        f"{arm}-headers": _but(
            arm,
            "bodies are hard to guess",
            "each turn is decided without and with its body",
            twice=True,
            faults=Faults(token_error=0.3),
        )._replace(against=())
        for arm in ("none", "handoff", "store", *SPLIT)
    },
    "split-overlap": _but(
        "split", "transfers overlap with prefills: a model, which vLLM is not", overlap=True
    ),
    **{
        f"{prefix}{name}": Pool(
            (*means, *words),
            {
                "tenants": who,
                **changes,
                "admission": 60.0 if fair else None,
                "params": FAIR if fair else (),
            },
            tuple(f"{prefix}{other}" for other in against),
            "none",
        )
        for prefix, words, changes in (
            ("", (), {}),
            ("four-", (FOUR,), {"gateways": 4}),
            ("split-", ARMS["split"].differs, {"split": True}),
            ("capped-", ("a prompt gets at most 2,048 tokens of a step",), {"tokens_per_prompt": 2048}),
        )
        for name, means, who, fair, against in (
            ("alone", ("only the smaller tenant sends", "fair shares"), (QUIET,), True, ()),
            (
                "in-turn",
                ("both tenants send", "requests are served as they come"),
                (QUIET, GREEDY),
                False,
                ("alone",),
            ),
            ("fair", ("both tenants send", "fair shares"), (QUIET, GREEDY), True, ("alone", "in-turn")),
        )
    },
    **{
        f"{arm}-{parameter}-{factor}": _but(
            arm, VARIED[parameter].format(factor), traffic=((parameter, factor),)
        )
        for arm in ("none", "store", *SPLIT)
        for parameter in VARIED
        for factor in FACTORS
    },
    **{
        f"{name}-{arm}{suffix}": Pool(
            (f"the requests of `{file}`", words),
            {**ARMS[arm].changes, "trace": file, "mode": mode},
            () if arm == "none" else (f"{name}-none{suffix}",),
            arm,
        )
        for name, file in TRACES.items()
        for arm in ARMS
        for suffix, mode, words in (
            ("", Mode.THINKTIME, "each when the one before it in its session has ended (mode thinktime)"),
            ("-timed", Mode.TIMESTAMPS, "each at its recorded time (mode timestamps)"),
        )
    },
}


def described(pool: str, known: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Return the deployment among the arms and `known` ones that a pool is like, and in what it differs from
    that."""
    differs, like = POOLS[pool].differs, POOLS[pool].like
    while like and like not in known and like not in ARMS:
        differs, like = POOLS[like].differs + differs, POOLS[like].like
    return like, differs

"""A team's own policies: written from the docs, tested and simulated, brought to two gateways by an init
container, judged in the shadow, and released as a canary; a bad one is rolled back by itself.

One load goes on all the time. It prints the regret that the shadow predicted beside the one that the canary
measured.
"""

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from pathlib import Path

import msgspec
import pytest
import yaml

from perilune_api import names
from perilune_api.trial import Arm, Sums, Tally, added
from testbed import images
from testbed.http import eventually
from testbed.paths import CHECKOUT
from testbed.pool import LivePool
from testbed.shell import ClusterError, run
from testbed.turns import Habits, Turn, Turns, agents

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

EXAMPLE = CHECKOUT / "examples" / "own-policy.yaml"
GOOD, BAD, ENDLESS = "least_busy", "hasty", "endless"
IMAGE = "perilune.test/least-busy-policy:0.1.0"
ENGINES, GATEWAYS = 4, 2
AGENTS, HABITS = 10, Habits(turns=4, pause_s=0.4)
"""So little work that no policy has to move a session."""
CANARY = {"share": 0.5, "tolerance": 0.5}
"""With half of the sessions a verdict needs fewest of them: some two hundred."""
VERDICT_S = 300
RESTARTS_S = 600
"""Each restart by the liveness probe takes over a minute and a half, and three are needed."""
JUDGED = 60
"""Opinions of each policy that the shadow is waited for."""

BAD_POLICIES = '''

def choose_hastily(
    request: RequestView, candidates: Sequence[Candidate], parameters: Parameters, rng: Random
) -> Verdict:
    """Choose the endpoint that knows least of the prompt, whatever it costs."""
    best, host = lowest(candidates, held_tokens, rng), host_of(request, candidates)
    if host is None or host is best:
        return Decision(best.address, Reason.LOWEST_COST)
    return Decision(best.address, Reason.MOVED, moved_from=host.address)


hasty = OutsidePolicy(decide=choose_hastily, contract=1)


def never_return(
    request: RequestView, candidates: Sequence[Candidate], parameters: Parameters, rng: Random
) -> Verdict:
    """Wait for ever."""
    while True:
        sleep(60)


endless = OutsidePolicy(decide=never_return, contract=1)
'''


# -- a package, as docs/policies.md says ---------------------------------------------------------------


def perilune(*args: str, cwd: Path, wheel: Path | None = None) -> str:
    """Return what `perilune` prints, with the wheel installed."""
    return python("-m", "perilune_lab.cli", *args, cwd=cwd, wheel=wheel)


def python(*args: str, cwd: Path, wheel: Path | None = None) -> str:
    environment = os.environ | ({"PYTHONPATH": str(wheel)} if wheel else {})
    return run([sys.executable, *args], env=environment, cwd=cwd)


def write(folder: Path) -> None:
    """Write the package: what `perilune policy new` writes, with another choice among nearly equal endpoints,
    and with two more policies that their author has not thought through."""
    perilune("policy", "new", GOOD, "--folder", str(folder), cwd=folder.parent)
    module, project = folder / f"{GOOD}_policy.py", folder / "pyproject.toml"
    text = module.read_text()
    for ours, theirs in (
        ("cheapest(candidates, costs, rng)", "nearly_cheapest(candidates, costs, rng)"),
        ("from random import Random\n", "from random import Random\nfrom time import sleep\n"),
        (
            "    cheapest,\n    host_of,\n",
            "    held_tokens,\n    host_of,\n    lowest,\n    nearly_cheapest,\n",
        ),
    ):
        assert ours in text
        text = text.replace(ours, theirs)
    module.write_text(text + BAD_POLICIES)
    entry = f'{GOOD} = "{GOOD}_policy:policy"\n'
    assert entry in project.read_text()
    more = "".join(f'{name} = "{GOOD}_policy:{name}"\n' for name in (BAD, ENDLESS))
    project.write_text(project.read_text().replace(entry, f"{entry}{more}"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("team") / GOOD
    write(folder)
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    python("-m", "pip", "wheel", *alone, "--wheel-dir", "dist", ".", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_package_passes_its_tests_and_is_simulated(wheel: Path) -> None:
    folder = wheel.parents[1]
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=folder, wheel=wheel)
    assert "gainSeconds" in perilune("policies", GOOD, cwd=folder, wheel=wheel)
    small = ("--endpoints", "4", "--window", "120", "--warmup", "30", "--rates", "0.3", "--seeds", "1")
    played = ("--policies", f"perilune,{GOOD},{BAD}", "--jobs", "1")
    told = perilune("simulate", *small, *played, cwd=folder, wheel=wheel)
    print(told)
    assert GOOD in told
    assert "is not what these figures show" not in told


# -- the pool of the example ---------------------------------------------------------------------------


def example() -> dict:
    """Return the example, with what is called otherwise here: images, Gateway, host; more engines and
    gateways, and the other policy in the shadow, too."""
    (pool,) = yaml.safe_load_all(EXAMPLE.read_text())
    spec = pool["spec"]
    pool["metadata"]["namespace"] = "default"
    spec["replicas"] = ENGINES
    spec["model"]["name"] = f"{pool['metadata']['name']}-30b"
    spec["routing"]["decisionHeader"] = "address"
    spec["routing"]["shadow"]["policies"].append(BAD)
    spec["routing"]["policy"]["outside"][BAD] = {}
    spec["gateway"] |= {
        "parent": {"name": "edge", "namespace": "edge"},
        "hostnames": [f"{pool['metadata']['name']}.test"],
        "replicas": GATEWAYS,
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }
    (copies,) = spec["gateway"]["podTemplate"]["spec"]["initContainers"]
    copies["image"] = IMAGE
    return pool


@pytest.fixture(scope="module")
def released(kube, edge, operator, state_image, cluster, wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    busybox = Path("/bin/busybox")
    files = images.files_layer(folder / "layer.tar", {"bin/cp": busybox, wheel.name: wheel})
    images.write_archive(IMAGE, folder / "image.tar", [files], ())
    cluster.load(folder / "image.tar")
    pool = LivePool(kube, edge, "own-policy")
    kube.apply(example())
    pool.becomes(ENGINES, timeout_s=180)
    eventually(lambda: pool.has_gateways(GATEWAYS), timeout_s=120)
    eventually(pool.answers)
    yield pool
    pool.delete()


def test_parameters_of_a_package_are_free_form_for_kubectl_and_a_misspelt_name_is_not_accepted(
    released,
) -> None:
    told = released.kube.ctl("explain", "ipool.spec.routing.policy.outside")
    assert "FIELD: outside <map[string]Object>" in " ".join(told.split())
    before = released.get()["spec"]["routing"]["policy"]["name"]
    document = told_to_gateways(released)
    released.patch(routing={"policy": {"name": "least_bussy"}})
    eventually(lambda: refuses(released, "Unknown policy 'least_bussy'"))
    assert told_to_gateways(released) == document
    with pytest.raises(ClusterError, match="Unsupported value"):
        released.patch(routing={"policy": {"name": "least_bussy", "outside": None}})
    released.patch(routing={"policy": {"name": before}})
    eventually(lambda: accepts(released))


def refuses(pool: LivePool, words: str) -> None:
    assert pool.conditions()["Accepted"] == ("False", "Invalid")
    assert words in pool.message("Accepted")


def accepts(pool: LivePool) -> None:
    assert pool.conditions()["Accepted"] == ("True", "Valid")


@dataclass(frozen=True)
class Predicted:
    """What the shadows of all gateways say of a policy."""

    decisions: int
    agreement: float
    regret_s: float
    hits: float
    decided_hits: float


@dataclass(frozen=True)
class Measured:
    """What both arms of a canary had when it was over."""

    verdict: str
    message: str
    pool: Tally
    canary: Tally

    @property
    def regret_s(self) -> float:
        return ttft_s(self.canary) - ttft_s(self.pool)


def ttft_s(arm: Tally) -> float:
    return exp(arm.ttft_log / arm.first_tokens)


def test_a_policy_is_tried_in_the_shadow_promoted_as_a_canary_and_a_bad_one_rolled_back(released) -> None:
    pool = released
    with agents(pool.client, AGENTS, "rollout", HABITS) as turns:
        shadow = {policy: judged(pool, policy) for policy in (GOOD, BAD)}
        assert pool.kube.page(f"deployment/{names.gateway_name(pool.name)}", "default", "/metrics").count(
            f'perilune_shadow_decisions_total{{agreement="same",policy="{GOOD}"'
        )

        chosen = {"name": GOOD, "outside": {GOOD: {"gainSeconds": 2}, BAD: {}}}
        good = tried(pool, turns, chosen, shadow=None)
        document, pods = told_to_gateways(pool), pool.uids()
        pool.patch(routing={"policy": chosen, "canary": None})
        eventually(lambda: has_no_canary(pool))
        assert (told_to_gateways(pool), pool.uids()) == (document, pods)
        turns.goes_on(20)
        switched = list(turns.done)

        bad = tried(pool, turns, {"name": BAD, "outside": {GOOD: {}, BAD: {}}})
        turns.goes_on(20)
    report({GOOD: shadow[GOOD], BAD: shadow[BAD]}, {GOOD: good, BAD: bad}, turns)

    assert turns.failures == []
    assert (good.verdict, bad.verdict) == ("NoWorse", "SlowerFirstTokens")
    assert "first tokens come" in bad.message
    assert {policy for policy, _ in decided(pool)} == {GOOD}, "the pool's policy decides again for all"
    assert shadow[BAD].regret_s > max(0.0, shadow[GOOD].regret_s)
    assert bad.regret_s > 0
    assert strays(switched) == []
    assert not any(turn.moved for turn in switched if turn.number), "nothing had to move"


@pytest.mark.long
def test_a_policy_that_never_returns_is_rolled_back_and_fails_no_request(released) -> None:
    """Envoy sends requests on without a gateway that stands still, and the liveness probe ends it."""
    pool = released
    released.patch(
        routing={"shadow": None, "canary": {"policy": {"name": ENDLESS, "outside": {ENDLESS: {}}}, **CANARY}}
    )
    with agents(pool.client, AGENTS, "endless", HABITS) as turns:
        eventually(lambda: gives_up(pool, "GatewaysRestarted"), RESTARTS_S, every_s=2)
        eventually(lambda: pool.has_gateways(GATEWAYS), timeout_s=240)
        turns.goes_on(50)
        eventually(lambda: in_force(pool, pool.get()["status"]["canary"]["policyInForce"]), timeout_s=60)
    asked = sum(bool(turn.reason) for turn in turns.done)
    print(f"{len(turns.done)} requests, of which gateways decided {asked}; {len(turns.failures)} failed")
    print(pool.message("CanaryPromoted"))
    assert turns.failures == []


# -- the steps -----------------------------------------------------------------------------------------


def judged(pool: LivePool, policy: str) -> Predicted:
    """Wait until the shadows of all gateways have judged enough decisions by the policy."""
    rows: list[dict] = []

    def enough() -> None:
        pages = [page["shadow"]["policies"] for page in pool.admins("/api/trying").values()]
        rows[:] = [row for page in pages for row in page if row["policy"] == policy]
        assert len(rows) == GATEWAYS
        assert [row["off"] for row in rows] == [""] * GATEWAYS
        assert min(row["decisions"]["same"] + row["decisions"]["other"] for row in rows) >= JUDGED, rows

    eventually(enough, timeout_s=180, every_s=2)
    weights = [row["decisions"]["same"] + row["decisions"]["other"] for row in rows]

    def mean(field: str) -> float:
        return sum(w * row[field] for w, row in zip(weights, rows, strict=True)) / sum(weights)

    return Predicted(sum(weights), *map(mean, ("agreement", "regret_s", "hit_ratio", "decided_hit_ratio")))


def tried(pool: LivePool, turns: Turns, policy: dict, **routing: object) -> Measured:
    """Give the policy its share of the sessions, until the operator has promoted it or rolled it back."""
    began, last = time.monotonic(), {}
    pool.patch(routing={"canary": {"policy": policy, **CANARY}, **routing})

    def over() -> None:
        found = [
            msgspec.convert(page[pool.name], Sums)
            for page in pool.admins(names.CANARY_PAGE).values()
            if pool.name in page
        ]
        if len(found) == GATEWAYS and len({sums.trial for sums in found}) == 1:
            last["sums"] = added(found, found[0].trial)
        assert pool.get()["status"].get("canary", {}).get("policy") == policy["name"]
        assert pool.conditions()["CanaryPromoted"][0] != "Unknown", pool.message("CanaryPromoted")

    eventually(over, VERDICT_S, every_s=1)
    status, sums = pool.get()["status"]["canary"], last["sums"]
    print(f"{policy['name']}: {status['state']} after {time.monotonic() - began:.0f} s: {status['message']}")
    is_event(pool, status["reason"], "Normal" if status["state"] == "Promoted" else "Warning")
    assert "canary" in pool.get()["spec"]["routing"], "the operator never writes the spec"
    eventually(lambda: in_force(pool, status["policyInForce"]))
    turns.goes_on(20)
    return Measured(status["reason"], status["message"], sums.whole(Arm.POOL), sums.whole(Arm.CANARY))


def gives_up(pool: LivePool, reason: str) -> None:
    assert pool.conditions().get("CanaryPromoted") == ("False", reason), pool.message("CanaryPromoted")


def is_event(pool: LivePool, reason: str, kind: str) -> None:
    def told() -> None:
        words = ("-n", "default", "--field-selector", f"involvedObject.name={pool.name},reason={reason}")
        assert kind in [event["type"] for event in pool.kube.get("event", *words)]

    eventually(told)


def in_force(pool: LivePool, policy: str) -> None:
    """Assert that every gateway lets this policy decide for all sessions."""
    assert [page["canary"] for page in pool.admins("/api/trying").values()] == [None] * GATEWAYS
    for found in pool.admins("/api/decisions?n=3").values():
        assert {row["policy"] for row in found["decisions"]} == {policy}


def has_no_canary(pool: LivePool) -> None:
    status = pool.get()["status"]
    assert status["observedGeneration"] == pool.get()["metadata"]["generation"]
    assert "canary" not in status or status["canary"] is None


def told_to_gateways(pool: LivePool) -> str:
    (document,) = [
        found["data"][names.POOL_DOCUMENT]
        for found in pool.objects()
        if (found["kind"], found["metadata"]["name"]) == ("ConfigMap", names.gateway_name(pool.name))
    ]
    return document


def decided(pool: LivePool) -> list[tuple[str, str]]:
    """Return policy and reason of the gateways' last decisions."""
    pages = pool.admins("/api/decisions?n=10").values()
    return [(row["policy"], row["reason"]) for page in pages for row in page["decisions"]]


def strays(turns: Iterable[Turn]) -> list[Turn]:
    """Return the turns that went to another engine without a decision that says so."""
    return [turn for turn in turns if turn.number and turn.moved and turn.reason not in ("moved", "planned")]


def report(shadow: dict[str, Predicted], canary: dict[str, Measured], turns: Turns) -> None:
    print(f"{len(turns.done)} requests, {len(turns.failures)} failed")
    for policy, predicted in shadow.items():
        found = canary[policy]
        print(
            f"{policy}: {found.verdict}\n"
            f"  shadow: {predicted.decisions} decisions, agreement {predicted.agreement:.0%},"
            f" regret {predicted.regret_s:+.3f} s,"
            f" hits {predicted.hits:.0%} (decided {predicted.decided_hits:.0%})\n"
            f"  canary: first token {ttft_s(found.pool):.3f} s → {ttft_s(found.canary):.3f} s, regret"
            f" {found.regret_s:+.3f} s; {found.pool.requests} and {found.canary.requests} requests,"
            f" {found.pool.sessions} and {found.canary.sessions} sessions\n"
            f"  {found.message}"
        )

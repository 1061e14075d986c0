"""Policies that packages bring: how they are found, their parameters, and answers that do not count."""

from pathlib import Path
from random import Random

import pytest
from policy_packages import MINE, answering, install, installed, on_path
from routing_objects import candidate, fleet, request, session

from perilune_api.policies import PolicyChoice, PolicyName, PolicyParams
from perilune_api.pool import Canary, Routing, Shadow
from perilune_gateway.model import NEED_BODY, Decision, Phase, Reason
from perilune_gateway.policy import OURS, POLICIES, FaultKind, PolicyError

HOST = request(of=session("a"))


def mine(**block: object) -> PolicyChoice:
    return PolicyChoice(name="mine", outside={"mine": block})


def decided(choice: PolicyParams = PolicyParams(), /) -> Decision:  # noqa: B008
    verdict = POLICIES["mine"](HOST, fleet(a=5_000, b=0), choice, Random(0))
    assert isinstance(verdict, Decision)
    return verdict


def test_a_policy_of_a_package_decides_by_its_name_with_its_block(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        assert list(POLICIES) == [*sorted(PolicyName), "mine"]
        assert (decided(mine()).target, decided(mine()).reason) == ("b", Reason.MOVED)
        assert (decided(mine(gainTokens=6000)).target, decided().target) == ("a", "b")
        assert POLICIES.found["mine"].origin == "my-policies 1.0"
    assert "mine" not in POLICIES


def test_it_cannot_reorder_what_others_see(tmp_path: Path) -> None:
    candidates = fleet(b=0, a=0)
    with installed(tmp_path, answering("candidates.sort()")), pytest.raises(PolicyError):
        POLICIES["mine"](request(), candidates, PolicyParams(), Random(0))
    assert [c.address for c in candidates] == ["b", "a"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import nothing_like_it",
            "cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'",
        ),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("policy = 3", "is no OutsidePolicy, but int: see docs/policies.md"),
        (
            MINE.replace("contract=1", "contract=9"),
            "written for version 9 of the contract of policies, and this",
        ),
        (MINE.replace("Meta(ge=0)] = 1000", "Meta(ge=0)]"), "its parameters lack defaults"),
        (MINE.replace("parameters=MineParameters", "parameters=int"), "its parameters are no subclass of"),
        (
            "import asyncio; raise asyncio.CancelledError",
            "cannot be imported: asyncio.exceptions.CancelledError",
        ),
        (
            MINE.replace("contract=1", "contract='1'"),
            "its contract is '1', which is no int: write contract=1",
        ),
        (
            MINE.replace("=MineParameters", "=MineParameters()"),
            "its parameters are no class, but a value of MineParameters: name the class",
        ),
        (
            MINE.replace("] = 1000", "] = -5"),
            "lack defaults that fit: msgspec.ValidationError: Expected `int` >= 0",
        ),
        (
            MINE.replace("longest_gain: int", "longest_gain: 'Nope'"),
            "lack defaults that fit: NameError: name 'Nope' is not",
        ),
        (
            MINE.replace("longest_gain: int", "longest_gain: int | Meta"),
            "lack defaults that fit: TypeError: ",
        ),
        (MINE.replace("if self", "assert not 1, 'no'\n            if self"), "AssertionError: no"),
        (MINE.replace("if self", "exit(3)\n            if self"), "lack defaults that fit: SystemExit: 3"),
        (
            MINE.replace("decide=decide", "decide=None"),
            "its decide cannot be called with (request, candidates,",
        ),
        (MINE.replace("candidates, parameters, rng):", "candidates):"), "too many positional arguments"),
    ],
    ids=[
        "import",
        "exits",
        "another object",
        "another contract",
        "no default",
        "no parameters",
        "cancelled",
        "contract as a text",
        "a value as parameters",
        "default out of range",
        "unknown annotation",
        "annotation without values",
        "defaults that its check refuses",
        "defaults that exit",
        "no function",
        "too few arguments",
    ],
)
def test_one_that_cannot_be_used_is_not_there_and_says_why(tmp_path: Path, source: str, said: str) -> None:
    with installed(tmp_path, source):
        assert list(POLICIES) == list(OURS)
        assert POLICIES.why_not("mine").startswith("Policy 'mine' of my-policies 1.0 cannot be used: ")
        assert said in POLICIES.why_not("mine")
        assert said in POLICIES.wrong(mine())["mine"]


def test_names_that_are_taken_or_no_names(tmp_path: Path) -> None:
    install(tmp_path, MINE, "ear")
    install(tmp_path, MINE, "My-Own")
    install(tmp_path, MINE, "both")
    install(tmp_path, MINE, "both", package="theirs")
    with on_path(tmp_path):
        assert POLICIES["ear"] is OURS["ear"]
        assert "Perilune has a policy of this name: rename it" in POLICIES.why_not("ear")
        assert "small letters, digits and _" in POLICIES.why_not("My-Own")
        assert "several packages have a policy of this name" in POLICIES.why_not("both")
        assert POLICIES.found["both"].origin == "my-policies 1.0, theirs 1.0"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"gainTokens": -1}, "Expected `int` >= 0 - at `$.spec.routing.policy.outside.mine.gainTokens`"),
        (
            {"gainTokens": "3"},
            "Expected `int`, got `str` - at `$.spec.routing.policy.outside.mine.gainTokens`",
        ),
        (
            {"gain": 3},
            "Object contains unknown field `gain`; mine knows gainTokens, longestGain"
            " - at `$.spec.routing.policy.outside.mine`",
        ),
        (
            {"longestGain": 3},
            "gainTokens is above longestGain: lower it - at `$.spec.routing.policy.outside.mine`",
        ),
    ],
    ids=["range", "type", "unknown", "its own rule"],
)
def test_what_is_wrong_with_its_parameters_names_the_field(
    tmp_path: Path, block: dict[str, object], said: str
) -> None:
    with installed(tmp_path, MINE):
        assert POLICIES.wrong(mine(**block)) == {"mine": said}
        assert POLICIES.wrong(mine()) == {}


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("assert self.gain_tokens < 5000, 'too many'", "AssertionError: too many"),
        ("{}[1] if self.gain_tokens > 5000 else 0", "KeyError: 1"),
        ("exit(3) if self.gain_tokens > 5000 else 0", "SystemExit: 3"),
        ("self.gain_tokens > 5000 and self.__post_init__()", "RecursionError: maximum recursion depth"),
    ],
)
def test_whatever_its_own_check_raises_refuses_the_block(tmp_path: Path, check: str, said: str) -> None:
    with installed(tmp_path, MINE.replace("if self", f"{check}\n            if self")):
        wrong = POLICIES.wrong(mine(gainTokens=6000))["mine"]
        assert wrong.startswith(said)
        assert wrong.endswith("- at `$.spec.routing.policy.outside.mine`")
        assert POLICIES.wrong(mine()) == {}


def test_what_a_pool_document_has_beside_its_policy_is_refused_by_its_field(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        canary = Canary(policy=mine(gainTokens=-1))
        routing = Routing(policy=mine(), canary=canary, shadow=Shadow(policies=("ear", "mine", "earr")))
        parameter, shadow = POLICIES.refused(routing)
    assert parameter == "Expected `int` >= 0 - at `$.spec.routing.canary.policy.outside.mine.gainTokens`"
    assert shadow.startswith("Unknown policy 'earr', known are conductor, ")
    assert shadow.endswith("- at `$.spec.routing.shadow.policies[2]`")


def test_blocks_of_policies_that_are_not_there_or_ours(tmp_path: Path) -> None:
    wrong = POLICIES.wrong(PolicyChoice(outside={"gone": {}, "ear": {}}))
    assert wrong["gone"].startswith("Unknown policy 'gone', known are conductor, ")
    assert wrong["gone"].endswith("- at `$.spec.routing.policy.outside.gone`")
    assert wrong["ear"].startswith("ear is Perilune's own: write its block next to `name`")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("None", "NoneType instead of Decision, Refusal or NEED_BODY"),
        ("NEED_BODY", "NEED_BODY for a body that it has"),
        ("Decision('z', Reason.HOST)", "a target that is no candidate"),
        ("Decision('a', 'host')", "a reason that no policy gives"),
        ("Decision('a', Reason.PLANNED)", "a reason that no policy gives"),
        ("Decision('b', Reason.MOVED, moved_from='c')", "moved_from, although the session does not leave"),
        ("Decision('a', Reason.MOVED, moved_from='a')", "moved_from, although the session does not leave"),
        ("Decision('a', Reason.HOST, prefill='b')", "prefill, move, unsplit or unpulled"),
        ("Decision('a', Reason.HOST, replicate_from='z')", "replicate_from that is no location"),
        ("Decision('a', Reason.HOST, cached_tokens=10**9)", "cached_tokens that are no int between"),
        ("Decision('a', Reason.HOST, estimated_ttft_s=math.nan)", "an estimated time that is no number"),
        ("Decision('a', Reason.HOST, [Cost('a', math.nan)])", "a cost that is no finite float or int"),
        (
            "Decision('a', Reason.HOST, [Cost('a', 1.0, {'x': math.inf})])",
            "a cost that is no finite float or int",
        ),
        ("Decision('a', Reason.HOST, [Cost('z', 1.0)])", "a cost of no candidate"),
        ("Decision('a', Reason.HOST, [Cost('a', 'much')])", "a cost that is no finite float or int"),
        ("Decision('a', Reason.HOST, [Cost('a', 10**400)])", "a cost that is no finite float or int"),
        ("Decision('a', Reason.HOST, [Cost('a', True)])", "a cost that is no finite float or int"),
        ("Decision('a', Reason.HOST, [Cost('a', Fraction(1))])", "a cost that is no finite float or int"),
        ("Decision('a', Reason.HOST, [Cost('a', Float(1))])", "a cost that is no finite float or int"),
        ("Decision('a', Reason.HOST, [Cost('a', 1, {'x': Float(1)})])", "a cost that is no finite float"),
        ("Decision('a', Reason.HOST, [Cost('a', 1, {3: 1.0})])", "terms of a cost that are no dict"),
        ("Decision('a', Reason.HOST, [Cost('a', 1, None)])", "terms of a cost that are no dict"),
        ("Decision('a', Reason.HOST, (Cost('a', 1) for _ in 'a'))", "costs that are no tuple or list"),
        ("Decision('a', Reason.HOST, None)", "costs that are no tuple or list"),
        ("Decision('a', Reason.HOST, [('a', 1.0, {})])", "a cost of no candidate"),
        ("Decision('a', Reason.HOST, cached_tokens=1.0)", "cached_tokens that are no int"),
        ("Decision('a', Reason.HOST, cached_tokens=False)", "cached_tokens that are no int"),
        ("Decision('a', Reason.HOST, estimated_ttft_s=10**400)", "an estimated time that is no number"),
        ("Decision('a', Reason.HOST, estimated_tpot_s=Float(1))", "an estimated time that is no number"),
        ("Decision('a', Reason.HOST, estimated_tpot_s=None)", "an estimated time that is no number"),
        ("Decision(['a'], Reason.HOST)", "an address that is no str"),
        ("Decision(Text('a'), Reason.HOST)", "an address that is no str"),
        ("Decision('a', Reason.HOST, moved_from=None)", "an address that is no str"),
        ("Decision('a', Reason.HOST, replicate_from=None)", "an address that is no str"),
        ("Decision('a', Reason.HOST, prefill=None)", "prefill, move, unsplit or unpulled"),
        ("Refusal(RefuseReason.OVERLOADED, 'no \\ud800')", "a Refusal with a wrong field"),
        ("Refusal(RefuseReason.OVERLOADED, 'no', 10**400)", "a Refusal with a wrong field"),
        ("Refusal('no', 'no')", "a Refusal with a wrong field"),
    ],
)
def test_nonsense_does_not_count(tmp_path: Path, expression: str, said: str) -> None:
    with installed(tmp_path, answering(expression)), pytest.raises(PolicyError, match=said) as caught:
        POLICIES["mine"](HOST, fleet(a=0, b=0), PolicyParams(), Random(0))
    assert caught.value.kind is FaultKind.NONSENSE


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "ZeroDivisionError in my_policies_mine.py:17"),
        ("{}[request.session.session_id]", "KeyError in my_policies_mine.py:17"),
        ("exit(1)", "SystemExit in "),
        ("raised(OverflowError())", "OverflowError in my_policies_mine.py"),
        ("raised(GeneratorExit())", "GeneratorExit in my_policies_mine.py"),
        ("raised(CancelledError())", "CancelledError in my_policies_mine.py"),
    ],
)
def test_an_exception_says_where_it_was_raised_and_nothing_of_the_request(
    tmp_path: Path, expression: str, said: str
) -> None:
    with installed(tmp_path, answering(expression)), pytest.raises(PolicyError) as caught:
        POLICIES["mine"](HOST, fleet(a=0), PolicyParams(), Random(0))
    assert caught.value.kind is FaultKind.RAISED
    assert str(caught.value).startswith(said)


def test_the_body_may_be_asked_for_before_it_came(tmp_path: Path) -> None:
    with installed(tmp_path, answering("NEED_BODY")):
        asked = request(phase=Phase.HEADERS)
        assert POLICIES["mine"](asked, [candidate()], PolicyParams(), Random(0)) is NEED_BODY


def test_our_own_policies_never_talk_nonsense() -> None:
    """By the rules that hold for others."""
    from perilune_gateway.policy.packages import nonsense

    for name, policy in OURS.items():
        for phase in Phase:
            asked = request(of=session("a"), phase=phase)
            some = [candidate("a", cached=500, pending=90_000), candidate("b", host=100), candidate("c")]
            assert nonsense(policy(asked, some, PolicyParams(), Random(0)), asked, some) == "", name

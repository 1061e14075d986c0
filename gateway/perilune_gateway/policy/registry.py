"""All policies by name: Perilune's, and those that installed packages bring.

A name is looked up in the packages only if it is not ours. What a package brings is loaded once, when it is
first needed. A policy that cannot be used is not among the names; `why_not` says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint
from random import Random

from perilune_api.policies import PolicyChoice, PolicyName, PolicyParams
from perilune_api.pool import Routing, SpecError
from perilune_gateway.model import Candidate, RequestView, Verdict
from perilune_gateway.policy import packages

Policy = Callable[[RequestView, Sequence[Candidate], PolicyParams, Random], Verdict]
"""A policy as the router calls it, with the parameters of all policies. That of a package may raise
PolicyError."""
AT_POOL, AT_CANARY = "$.spec.routing.policy", "$.spec.routing.canary.policy"
"""Paths of the choices that a pool document has."""


class Policies(Mapping[str, Policy]):
    """All policies by name: ours, then those of packages, which are looked for when they are first needed."""

    def __init__(self, ours: Mapping[str, Policy], installed: Callable[[], Iterable[EntryPoint]]) -> None:
        self._ours = ours
        self._installed = installed

    @cached_property
    def found(self) -> Mapping[str, packages.Found]:
        """All policies that packages bring, also those that cannot be used."""
        return packages.find(self._installed(), self._ours)

    def look_again(self) -> None:
        """Forget what was found, because packages were installed or removed."""
        for name in ("found", "_outside"):
            self.__dict__.pop(name, None)

    def __getitem__(self, name: str) -> Policy:
        if name in self._ours:
            return self._ours[name]
        return self._outside[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._ours, *self._outside))

    def __len__(self) -> int:
        return len(self._ours) + len(self._outside)

    @cached_property
    def _outside(self) -> Mapping[str, Policy]:
        """The policies of packages that can be used."""
        return {name: outside(found) for name, found in self.found.items() if found.policy}

    def why_not(self, name: str) -> str:
        """Return why there is no policy of this name, in one sentence without a full stop."""
        found = self.found.get(name)
        if found is not None and found.problem:
            return f"Policy {name!r} of {found.origin} cannot be used: {found.problem}"
        return (
            f"Unknown policy {name[:100]!r}, known are {', '.join(self)}"
            " (one of a package must be installed where this runs)"
        )

    def refused(self, routing: Routing) -> Iterator[str]:
        """Yield what is wrong with the policies that decide, and those that are asked beside them."""
        yield from self.wrong(routing.policy).values()
        if routing.canary:
            yield from self.wrong(routing.canary.policy, AT_CANARY).values()
        for number, name in enumerate(routing.shadow.policies):
            if name not in self:
                yield f"{self.why_not(name)} - at `$.spec.routing.shadow.policies[{number}]`"

    def wrong(self, choice: PolicyChoice, at: str = AT_POOL) -> Mapping[str, str]:
        """Return, for each policy of a package that the choice names or gives parameters, what is wrong with
        it or with them; nothing for those that can run. `at`: path of the choice."""
        wrong: dict[str, str] = {}
        for name in dict.fromkeys((choice.name, *choice.outside)):
            if name in self._ours and name not in choice.outside:
                continue
            place = f"{at}.name" if name == choice.name else f"{at}.outside.{name}"
            if name in self._ours:
                wrong[name] = f"{name} is Perilune's own: write its block next to `name` - at `{place}`"
            elif name not in self:
                wrong[name] = f"{self.why_not(name)} - at `{place}`"
            elif (policy := self.found[name].policy) is not None:
                try:
                    packages.typed(name, policy, choice.outside.get(name, {}), f"{at}.outside.{name}")
                except SpecError as error:
                    wrong[name] = str(error)
        return wrong

    def moves_sessions(self, name: str) -> bool:
        """Return whether a policy moves sessions away from hot endpoints itself."""
        if name in self._ours:
            return name in (PolicyName.EAR, PolicyName.PERILUNE)
        found = self.found.get(name)
        return bool(found and found.policy and found.policy.moves_sessions)

    def asks_for_holders(self, name: str) -> bool:
        """Return whether a policy asks for all endpoints that hold a prompt's prefix."""
        if name in self._ours:
            return name == PolicyName.CONDUCTOR
        found = self.found.get(name)
        return bool(found and found.policy and found.policy.all_holders)


def outside(found: packages.Found) -> Policy:
    """Return the policy of a package as the router calls it, with its own block of the parameters. It raises
    PolicyError, also for wrong parameters."""
    policy, name = found.policy, found.name
    assert policy is not None, "it can be used"

    def decide(
        request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
    ) -> Verdict:
        block = params.outside.get(name, {}) if isinstance(params, PolicyChoice) else {}
        try:
            typed = packages.typed(name, policy, block, f"{AT_POOL}.outside.{name}")
        except SpecError as error:
            raise packages.PolicyError(packages.FaultKind.RAISED, str(error)) from error
        return packages.call(policy, request, candidates, typed, rng)

    return decide

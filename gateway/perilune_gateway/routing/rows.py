"""Candidates and costs of one decision, made when somebody reads them: of most decisions nobody ever does.

A decision that follows a session to its host reads one candidate of 64; the others are kept as what they are
made from, which is shared between decisions or never changes, so that the record of a decision can still be
read in full, exactly as the policy saw it, as long as it is kept. Whoever goes over all candidates gets them
made column by column, once.

`addresses`, `loads`, `find`, `totals` and `ranked` read one column of any candidates or costs, and of these
without making the rest. Costs: 0.7 µs a candidate, 0.4 for all of many. Does not: know where values come
from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, overload

from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Cost, Endpoint, EngineModel, Load, Overlap

View = tuple[Endpoint, Load, float, Mapping[str, Link]]
"""An endpoint, what it has to do, seconds since a session moved, links to all others."""
_new = tuple.__new__
"""A third of a named tuple's own constructor."""
_load = itemgetter(1)


class Rows(Sequence[Candidate]):
    """The candidates of one decision. Sequences of facts are in their order; nothing given here may change
    afterwards."""

    __slots__ = (
        "_alike", "_at", "_decodes_s", "_elsewhere", "_engines", "_first", "_holders", "_links", "_made",
        "_others", "_overlaps", "_positions", "_tokens", "_ttft_ratios", "addresses", "views",
    )  # fmt: skip

    def __init__(
        self,
        views: Sequence[View],
        addresses: Sequence[str],
        positions: Mapping[str, int],
        tokens: int,
        overlaps: Mapping[str, Overlap],
        elsewhere: Overlap,
        holders: Sequence[str],
        links: list[Mapping[str, Link] | None],
        engines: Sequence[EngineModel],
        alike: bool,
        decodes_s: Mapping[str, float],
        ttft_ratios: Sequence[float],
    ) -> None:
        """`positions`: of the addresses. `tokens`: of the prompt. `elsewhere`: the overlap of endpoints that
        are not in `overlaps`. `links`: to the `holders` of the prefix, filled in where it is None. `alike`:
        the engines are all the same."""
        self.views = views
        self.addresses = addresses
        self._positions = positions
        self._tokens = tokens
        self._overlaps = overlaps
        self._elsewhere = elsewhere
        self._holders = holders
        self._links = links
        self._engines = engines
        self._alike = alike
        self._decodes_s = decodes_s
        self._ttft_ratios = ttft_ratios
        self._at = -1
        self._first: Candidate | None = None
        """The first that was asked for by itself, mostly the only one; and where it is."""
        self._others: dict[int, Candidate] | None = None
        """All others that were: who asks again gets the same object."""
        self._made: list[Candidate] | None = None

    def __len__(self) -> int:
        return len(self.views)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if self._made is not None or isinstance(at, slice):
            return self._all()[at]
        return self._row(range(len(self.views))[at])

    def find(self, address: str) -> Candidate | None:
        """None: it is no candidate."""
        at = self._positions.get(address)
        return None if at is None else self._row(at)

    def _row(self, at: int) -> Candidate:
        if self._made is not None:
            return self._made[at]
        if at == self._at and self._first is not None:
            return self._first
        if self._others and at in self._others:
            return self._others[at]
        endpoint, load, moved_s, _ = self.views[at]
        address = endpoint.address
        overlap = self._overlaps.get(address, self._elsewhere)
        device, engine = overlap[0], self._engines[at]
        facts = (
            endpoint,
            load,
            overlap,
            engine.prefill_s(self._tokens - device, device),
            moved_s,
            self._links_of(at),
            engine,
            self._decodes_s.get(address, 0.0),
            self._ttft_ratios[at],
        )
        row: Candidate = _new(Candidate, facts)
        if self._first is None:
            self._at, self._first = at, row
        elif self._others is None:
            self._others = {at: row}
        else:
            self._others[at] = row
        return row

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> list[Candidate]:
        if self._made is None:
            endpoints, loads, moved_s, _ = zip(*self.views, strict=True) if self.views else ((), (), (), ())
            held = list(map(self._overlaps.get, self.addresses, repeat(self._elsewhere)))
            rows = zip(
                endpoints,
                loads,
                held,
                self._prefills_s(held),
                moved_s,
                map(self._links_of, range(len(self.views))),
                self._engines,
                map(self._decodes_s.get, self.addresses, repeat(0.0)),
                self._ttft_ratios,
                strict=True,
            )
            made = list(map(_new, repeat(Candidate), rows))
            for at, row in (self._others or {}).items():
                made[at] = row
            if self._first is not None:
                made[self._at] = self._first
            self._made = made
        return self._made

    def _links_of(self, at: int) -> Mapping[str, Link]:
        links = self._links[at]
        if links is None:
            everybody = self.views[at][3]
            links = self._links[at] = {a: everybody[a] for a in self._holders if a in everybody}
        return links

    def _prefills_s(self, held: Sequence[Overlap]) -> list[float]:
        """Computed once for all that hold equally much and are equally fast."""
        if self._alike and self._engines:
            prefill_s = self._engines[0].prefill_s
            times = {overlap: prefill_s(self._tokens - overlap[0], overlap[0]) for overlap in set(held)}
            return [times[overlap] for overlap in held]
        both = zip(self._engines, held, strict=True)
        return [engine.prefill_s(self._tokens - overlap[0], overlap[0]) for engine, overlap in both]


class Costs(Sequence[Cost]):
    """Costs of candidates, in their order."""

    __slots__ = ("_each", "_terms", "_totals", "addresses")

    def __init__(
        self,
        addresses: Sequence[str],
        totals: Sequence[float] | Callable[[Sequence[Any]], Sequence[float]],
        each: Sequence[Any],
        terms: Callable[[Any], Mapping[str, float]],
    ) -> None:
        """`each`: what they are reckoned from. `totals`: where a function of it, they are reckoned whenever
        they are read, so that who keeps these keeps little; nothing given here may change afterwards.
        `terms`: what a cost consists of, by one of `each`."""
        self.addresses = addresses
        self._each = each
        self._totals = totals
        self._terms = terms

    @property
    def totals(self) -> Sequence[float]:
        totals = self._totals
        return totals(self._each) if callable(totals) else totals

    def __len__(self) -> int:
        return len(self.addresses)

    @overload
    def __getitem__(self, at: int) -> Cost: ...
    @overload
    def __getitem__(self, at: slice) -> list[Cost]: ...
    def __getitem__(self, at: int | slice) -> Cost | list[Cost]:
        if isinstance(at, slice):
            return list(self)[at]
        return Cost(self.addresses[at], self.totals[at], self._terms(self._each[at]))

    def __iter__(self) -> Iterator[Cost]:
        each = zip(self.addresses, self.totals, self._each, strict=True)
        return (Cost(address, total, self._terms(of)) for address, total, of in each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def addresses(candidates: Sequence[Candidate]) -> Sequence[str]:
    return candidates.addresses if isinstance(candidates, Rows) else [c.address for c in candidates]


def loads(candidates: Sequence[Candidate]) -> list[Load]:
    return list(map(_load, candidates.views if isinstance(candidates, Rows) else candidates))


def find(candidates: Sequence[Candidate], address: str) -> Candidate | None:
    """None: it is no candidate."""
    if isinstance(candidates, Rows):
        return candidates.find(address)
    return next((c for c in candidates if c.endpoint.address == address), None)


def totals(costs: Sequence[Cost]) -> dict[str, float]:
    """By address."""
    if isinstance(costs, Costs):
        return dict(zip(costs.addresses, costs.totals, strict=True))
    return {cost.address: cost.total for cost in costs}


def ranked(costs: Sequence[Cost], count: int) -> list[str]:
    """The addresses of the `count` cheapest, cheapest first."""
    if isinstance(costs, Costs):
        totals = costs.totals
        order = sorted(range(len(totals)), key=totals.__getitem__)[:count]
        return [costs.addresses[at] for at in order]
    return [cost.address for cost in sorted(costs, key=itemgetter(1))[:count]]

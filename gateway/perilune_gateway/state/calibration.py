"""Corrects predictions by measurement: averages of observed / predicted seconds.

    observe(observed, predicted, now)  →  ratio(now): 1.0 = as predicted, 3.0 = three times slower

There is one `Ratio` per endpoint for prefill, for the time to the first token and for loading from the shared
store, and one per link for transfers. Each ratio has a prior, the value assumed before any observation. The
prior of an endpoint's ratio is that of the whole pool. A link without observations is as slow as the slower
of its source's other transfers, which queue at one network card, and of those of links of its level (within a
node, a rack, a spine, or beyond), which share its switches; without either, as the pool's. Every other prior
is 1.0.

1. An observation is limited to the range LOW to HIGH, so that one outlier changes an average little.
2. Averages are exponential with the gain `GAIN`. The first observations weigh more, and the prior counts as
   one observation, so a single observation never decides.
3. Without new observations, ratios of transfers and of the store return to their prior, by half every
   HALF_LIFE_S seconds. A link that was slow, and is therefore not used, gets another chance.
4. An observation weighs p² / (p² + NOISE_S²), where p is the predicted time: a short one measures delays more
   than speed, but many short ones together tell as much as a long one, so fast engines are learnt too.
5. An endpoint counts as fast as the pool until its own prefills weigh ENOUGH, so that one delayed event does
   not make it look slower than the others.

Replicas of the gateway tell each other their measurements (`on_measured`, `learn`), so each learns from all.
One that starts begins with what they have learned (`learned`, `take_over`).

The calibration also averages the seconds that a request decodes on an endpoint, with the same gain. Time is
an argument, reading changes nothing, and every method except `on_endpoint_left`, `links` and `learned` costs
O(1).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import NamedTuple

from perilune_api.topology import Level
from perilune_gateway.model import H20_30B, EngineModel
from perilune_gateway.model.shared import Learned, Measure, Measured
from perilune_gateway.state import facts

LOW, HIGH = 0.1, 30.0
GAIN = 0.1
HALF_LIFE_S = 600.0
NOISE_S = 0.01
"""Typical error of an observed time: delayed events, scheduling, work that other requests share."""
ENOUGH = 3.0
SPEED_S = 10.0
"""Seconds for which a computed speed is reused. What was learned fades by about 1 % in this time."""
MOST_ENGINES = 1024
"""Most engine models that are kept, each for other ratios."""


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Averaged observed / predicted seconds."""

    ratio: float = 1.0
    observations: int = 0
    age_s: float = 0.0
    """Seconds since the last observation."""


@dataclass(frozen=True, slots=True)
class EndpointCalibration:
    """Measurements of one endpoint."""

    prefill: RatioStats = RatioStats()
    ttft: RatioStats = RatioStats()
    decode_s: float = 0.0
    """Mean seconds that a request decodes. 0 if it is unknown."""
    sends: RatioStats = RatioStats()
    """Transfers that other endpoints pulled from it."""
    store: RatioStats = RatioStats()
    """Its loads from the shared store."""


@dataclass(slots=True, kw_only=True)
class Ratio:
    """An average of observed / predicted seconds and a prior. The prior is an argument of each reading."""

    half_life_s: float = inf
    """Seconds without observations after which half of the learned value has faded."""
    _learned: float = 0.0
    """Sum of observations × their weights."""
    _weight: float = 0.0
    """Sum of the observations' weights; the prior has the rest, 1 − _weight."""
    _at: float = 0.0
    _told: float = 0.0
    """Sum of the observations' weights by point 4, each 1 at most."""
    count: int = 0

    def at(self, now: float, prior: float = 1.0) -> float:
        """Return the ratio, which returns to the prior after the last observation."""
        if not self.count:
            return prior
        left = self._left(now)
        return self._learned * left + prior * (1.0 - self._weight * left)

    def observe(self, observed_s: float, predicted_s: float, now: float) -> None:
        """Add an observation. `predicted_s` is the prediction without correction."""
        if predicted_s <= 0.0:
            return
        seen = min(HIGH, max(LOW, observed_s / predicted_s))
        telling = predicted_s**2 / (predicted_s**2 + NOISE_S**2)
        self.count += 1
        self._told += telling
        gain = telling * max(GAIN, 1.0 / (self._told + 1.0))
        kept = self._left(now) * (1.0 - gain)
        self._learned = self._learned * kept + seen * gain
        self._weight = self._weight * kept + gain
        self._at = now

    def learned(
        self, of: Measure, now: float, endpoint: str = "", source: str = "", level: Level | None = None
    ) -> Learned:
        """Return what another replica needs to go on from here."""
        return Learned(
            of=of,
            endpoint=endpoint,
            source=source,
            level=level,
            learned=self._learned,
            weight=min(1.0, self._weight),
            told=self._told,
            count=self.count,
            seconds=max(0.0, now - self._at),
        )

    def take_over(self, learned: Learned, now: float) -> None:
        """Go on from what another replica had learned, unless there are observations here."""
        if not self.count:
            self._weight = learned.weight
            self._learned = min(HIGH * self._weight, max(LOW * self._weight, learned.learned))
            self._told, self.count = learned.told, learned.count
            self._at = now - learned.seconds

    def _left(self, now: float) -> float:
        """Return the share of the learned value that has not faded."""
        if self.half_life_s == inf:
            return 1.0
        left: float = 0.5 ** (max(0.0, now - self._at) / self.half_life_s)
        return left

    def of_one(self, now: float, pool: float) -> float:
        """Return the ratio of one endpoint of a pool that has the ratio `pool`."""
        return self.at(now, pool) if self._told >= ENOUGH else pool

    def stats(self, now: float, prior: float = 1.0) -> RatioStats:
        return RatioStats(self.at(now, prior), self.count, now - self._at if self.count else 0.0)


@dataclass(slots=True, kw_only=True)
class _Endpoint:
    """Ratios of one endpoint, or of all endpoints together."""

    prefill: Ratio = field(default_factory=Ratio)
    ttft: Ratio = field(default_factory=Ratio)
    sends: Ratio = field(default_factory=lambda: Ratio(half_life_s=HALF_LIFE_S))
    store: Ratio = field(default_factory=lambda: Ratio(half_life_s=HALF_LIFE_S))
    decode_s: float = 0.0
    decodes: int = 0

    def ratios(self) -> tuple[tuple[Measure, Ratio], ...]:
        return (
            (Measure.PREFILL, self.prefill),
            (Measure.TTFT, self.ttft),
            (Measure.STORE, self.store),
            (Measure.TRANSFER, self.sends),
        )


_UNKNOWN = _Endpoint()
"""Stands for an endpoint without observations; never written."""


class Speed(NamedTuple):
    """Speed of an endpoint, corrected by measurement."""

    engine: EngineModel
    """The pool's engine model, scaled by the endpoint's ratios."""
    decode_s: float
    """Mean seconds that a request decodes. 0 if it is unknown."""
    ttft_ratio: float
    """Observed / predicted seconds to the first token."""


class _Priors(NamedTuple):
    """Ratios of a pool, the priors of its endpoints."""

    prefill: float
    ttft: float
    store: float


class Calibration:
    """The ratios of a pool."""

    def __init__(
        self,
        engine: EngineModel = H20_30B,
        tell: facts.Tell = facts.nobody,
        level: Callable[[str, str], Level | None] = lambda source, target: None,
    ) -> None:
        """`engine` is the assumed speed of the pool's engines before any observation. `tell` hears of each
        measurement of this replica. `level` returns the nearest level that source and target share, if they
        are known."""
        self.engine = engine
        self._tell = tell
        self._level = level
        self.transfers = 0
        """Number of transfers between endpoints that were observed."""
        self._speeds: dict[str, tuple[float, Speed]] = {}
        """Address → (time until which the speed is reused, speed)."""
        self._engines: dict[tuple[float, float], EngineModel] = {}
        """(prefill ratio, store ratio) → the engine with them."""
        self._priors: tuple[float, _Priors] = (nan, _Priors(1.0, 1.0, 1.0))
        """The time of the last question for the pool's ratios, and the answer: a decision asks for each
        endpoint."""
        self._pool = _Endpoint()
        """Ratios over all endpoints, including those that left the pool."""
        self._endpoints: dict[str, _Endpoint] = {}
        self._links: dict[tuple[str, str], Ratio] = {}
        self._levels: dict[Level, Ratio] = {}
        self.observed = 0
        """Number of measurements, of this and other replicas."""

    # -- observations ------------------------------------------------------------------------------

    def prefill(self, address: str, observed_s: float, predicted_s: float, now: float) -> None:
        """Record a prefill that ran alone on the endpoint."""
        self._record(
            Measured(of=Measure.PREFILL, endpoint=address, observed_s=observed_s, predicted_s=predicted_s),
            now,
        )

    def ttft(self, address: str, observed_s: float, predicted_s: float, now: float) -> None:
        """Record the time from a decision to the end of its prefill, including the queue."""
        self._record(
            Measured(of=Measure.TTFT, endpoint=address, observed_s=observed_s, predicted_s=predicted_s), now
        )

    def decoded(self, address: str, seconds: float) -> None:
        """Record the seconds from a request's first to its last token."""
        self._record(Measured(of=Measure.DECODE, endpoint=address, observed_s=seconds), 0.0)

    def transfer(self, source: str, target: str, observed_s: float, predicted_s: float, now: float) -> None:
        """Record a KV transfer that `target` pulled from `source`."""
        self._record(
            Measured(
                of=Measure.TRANSFER,
                endpoint=target,
                observed_s=observed_s,
                predicted_s=predicted_s,
                source=source,
            ),
            now,
        )

    def store(self, address: str, observed_s: float, predicted_s: float, now: float) -> None:
        """Record that the endpoint loaded KV from the shared store."""
        self._record(
            Measured(of=Measure.STORE, endpoint=address, observed_s=observed_s, predicted_s=predicted_s), now
        )

    def _record(self, seen: Measured, now: float) -> None:
        self.learn(seen, now)
        self._tell(facts.Measured(seen))

    def learn(self, seen: Measured, now: float) -> None:
        """Learn from a measurement of this or another replica."""
        self.observed += 1
        if seen.of is Measure.DECODE:
            self._speeds.pop(seen.endpoint, None)
            endpoint = self._endpoint(seen.endpoint)
            endpoint.decodes += 1
            gain = max(GAIN, 1.0 / endpoint.decodes)
            endpoint.decode_s += (seen.observed_s - endpoint.decode_s) * gain
            return
        self._speeds.clear()
        self._priors = nan, self._priors[1]
        for ratio in self._ratios(seen):
            ratio.observe(seen.observed_s, seen.predicted_s, now)

    def _ratios(self, seen: Measured) -> tuple[Ratio, ...]:
        """Return the averages to which a measurement belongs."""
        if seen.of is Measure.TRANSFER:
            self.transfers += 1
            link = self._links.setdefault((seen.source, seen.endpoint), Ratio(half_life_s=HALF_LIFE_S))
            ratios = self._pool.sends, self._endpoint(seen.source).sends, link
            if (level := self._level(seen.source, seen.endpoint)) is None:
                return ratios
            return *ratios, self._levels.setdefault(level, Ratio(half_life_s=HALF_LIFE_S))
        pool, endpoint = self._pool, self._endpoint(seen.endpoint)
        if seen.of is Measure.PREFILL:
            return pool.prefill, endpoint.prefill
        if seen.of is Measure.TTFT:
            return pool.ttft, endpoint.ttft
        return pool.store, endpoint.store

    def learned(self, now: float) -> Iterator[Learned]:
        """Yield all averages, those of the whole pool first and those of links last."""
        for address, known in (("", self._pool), *self._endpoints.items()):
            for of, ratio in known.ratios():
                if ratio.count:
                    pulled = of is Measure.TRANSFER
                    yield ratio.learned(of, now, "" if pulled else address, address if pulled else "")
            if known.decodes:
                yield Learned(
                    of=Measure.DECODE,
                    endpoint=address,
                    learned=known.decode_s,
                    weight=1.0,
                    told=0.0,
                    count=known.decodes,
                    seconds=0.0,
                )
        for level, ratio in self._levels.items():
            yield ratio.learned(Measure.TRANSFER, now, level=level)
        for (source, target), ratio in self._links.items():
            yield ratio.learned(Measure.TRANSFER, now, target, source)

    def take_over(self, learned: Learned, now: float) -> None:
        """Begin with an average of another replica, unless there are observations of the same here. `now`:
        the time of its stamp."""
        self._speeds.clear()
        self._priors = nan, self._priors[1]
        if learned.of is not Measure.DECODE:
            self._average(learned).take_over(learned, now)
        elif not (endpoint := self._endpoint(learned.endpoint)).decodes:
            endpoint.decode_s, endpoint.decodes = learned.learned, learned.count

    def _average(self, of: Learned) -> Ratio:
        if of.of is not Measure.TRANSFER:
            known = self._endpoint(of.endpoint) if of.endpoint else self._pool
            return dict(known.ratios())[of.of]
        if of.level is not None:
            return self._levels.setdefault(of.level, Ratio(half_life_s=HALF_LIFE_S))
        if of.endpoint:
            return self._links.setdefault((of.source, of.endpoint), Ratio(half_life_s=HALF_LIFE_S))
        return (self._endpoint(of.source) if of.source else self._pool).sends

    def on_endpoint_left(self, fact: facts.EndpointLeft) -> None:
        address = fact.address  # another endpoint may get it
        self._speeds.clear()
        self._endpoints.pop(address, None)
        for link in [link for link in self._links if address in link]:
            del self._links[link]

    # -- questions ---------------------------------------------------------------------------------

    def prefill_ratio(self, address: str, now: float) -> float:
        return self._known(address).prefill.of_one(now, self._pool_ratios(now).prefill)

    def ttft_ratio(self, address: str, now: float) -> float:
        return self._known(address).ttft.of_one(now, self._pool_ratios(now).ttft)

    def store_ratio(self, address: str, now: float) -> float:
        return self._known(address).store.at(now, self._pool_ratios(now).store)

    def decode_s(self, address: str) -> float:
        return self._known(address).decode_s

    def speed(self, address: str, now: float) -> Speed:
        """Return the endpoint's speed. It is reused for SPEED_S seconds, or until the next observation."""
        until, speed = self._speeds.get(address, (-inf, None))
        if speed is None or now >= until:
            speed = self._speed(address, now)
            self._speeds[address] = (now + SPEED_S, speed)
        return speed

    def _speed(self, address: str, now: float) -> Speed:
        known, pool = self._known(address), self._pool_ratios(now)
        ratios = round(known.prefill.of_one(now, pool.prefill), 2), round(known.store.at(now, pool.store), 1)
        engine = self._engines.get(ratios)
        if engine is None:
            if len(self._engines) >= MOST_ENGINES:
                self._engines.clear()
            engine = self._engines[ratios] = self._corrected(*ratios)
        return Speed(engine, known.decode_s, known.ttft.of_one(now, pool.ttft))

    def _corrected(self, prefill: float, store: float) -> EngineModel:
        """Return the engine model with these ratios."""
        engine = self.engine
        if prefill != 1.0:
            engine = engine.scaled(prefill)
        if store != 1.0:
            engine = replace(engine, store_bytes_per_s=engine.store_bytes_per_s / store)
        return engine

    def slowdown(self, source: str, target: str, now: float) -> float:
        """Return observed / predicted seconds of a transfer from `source` to `target`."""
        if link := self._links.get((source, target)):
            return link.at(now)
        level = self._level(source, target) if self._levels else None
        near = [self._known(source).sends] if level is None else [self._known(source).sends, self._at(level)]
        return max((ratio.at(now) for ratio in near if ratio.count), default=self._pool.sends.at(now))

    def of(self, address: str, now: float) -> EndpointCalibration:
        known, pool = self._known(address), self._pool
        return EndpointCalibration(
            known.prefill.stats(now, pool.prefill.at(now)),
            known.ttft.stats(now, pool.ttft.at(now)),
            known.decode_s,
            known.sends.stats(now),
            known.store.stats(now, pool.store.at(now)),
        )

    def links(self, now: float) -> Mapping[tuple[str, str], RatioStats]:
        """Return the ratio of every link that was used, by (source, target)."""
        return {link: ratio.stats(now) for link, ratio in self._links.items()}

    def _pool_ratios(self, now: float) -> _Priors:
        asked, ratios = self._priors
        if asked != now:
            pool = self._pool
            ratios = _Priors(pool.prefill.at(now), pool.ttft.at(now), pool.store.at(now))
            self._priors = now, ratios
        return ratios

    def levels(self, now: float) -> Mapping[Level, RatioStats]:
        """Return the ratio of the links of each level that was used."""
        return {level: ratio.stats(now) for level, ratio in self._levels.items()}

    def _at(self, level: Level) -> Ratio:
        return self._levels.get(level, _UNKNOWN.sends)

    def _known(self, address: str) -> _Endpoint:
        return self._endpoints.get(address, _UNKNOWN)

    def _endpoint(self, address: str) -> _Endpoint:
        return self._endpoints.setdefault(address, _Endpoint())

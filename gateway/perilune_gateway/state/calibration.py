"""How fast things really are: observed / predicted seconds, learned online.

    observe(observed, predicted, now)  →  ratio(now): 1.0 = as predicted, 3.0 = three times slower

One `Ratio` per endpoint for prefill, for the time to the first token and for loading from the shared store,
one per link for transfers. An endpoint's prior, what is assumed before anything is observed, is the pool's
ratio, so one that was never used is believed to be like those that were, neither slower nor faster. A link of
which nothing is known is as slow as its source's transfers are on the whole (they queue at its NIC), a source
without any as the pool's. Every other prior is 1.0, as predicted.

1. An observation is bounded to LOW … HIGH: one outlier moves an average by a bounded step.
2. Averages are exponential with gain `GAIN`; the first observations weigh more, and the prior counts as one,
   so a single observation never decides and a ratio is shrunk to its prior by how few it has.
3. Without observations a link's ratio drifts back to its prior, half of the way every HALF_LIFE_S, and so
   do its source's and the pool's: what was slow and is therefore not used gets another chance.
4. What was predicted to take less than LEAST_S says more of overheads than of speed and is ignored.

Also the seconds that a request decodes on an endpoint, an average of the same gain. Time is an argument;
reading changes nothing. Cost: O(1) each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from perilune_gateway.model import H20_30B, EngineModel

LOW, HIGH = 0.1, 30.0
GAIN = 0.1
HALF_LIFE_S = 600.0
LEAST_S = 0.05
SPEED_S = 10.0
"""What was learned of the store fades by a hundredth in this time, so a speed is read anew after it."""


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Observed / predicted seconds of something, averaged."""

    ratio: float = 1.0
    observations: int = 0
    age_s: float = 0.0
    """Since the last observation."""


@dataclass(frozen=True, slots=True)
class EndpointCalibration:
    """What was learned of one endpoint."""

    prefill: RatioStats = RatioStats()
    ttft: RatioStats = RatioStats()
    decode_s: float = 0.0
    """Seconds that a request decodes; 0: unknown."""
    sends: RatioStats = RatioStats()
    """Transfers that others pulled from it."""
    store: RatioStats = RatioStats()
    """What it loaded from the shared store."""


@dataclass(slots=True)
class Ratio:
    """An average of observed / predicted and of a prior, which is given when it is read."""

    half_life_s: float = inf
    """Of what was learned, while nothing is observed."""
    _learned: float = 0.0
    """Sum of observations × their weights."""
    _weight: float = 0.0
    """Of the observations; what is missing to 1 is the prior's."""
    _at: float = 0.0
    count: int = 0

    def at(self, now: float, prior: float = 1.0) -> float:
        """The ratio, drifted towards the prior since the last observation."""
        left = self._left(now)
        return self._learned * left + prior * (1.0 - self._weight * left)

    def observe(self, observed_s: float, predicted_s: float, now: float) -> None:
        """`predicted_s` is the uncorrected prediction."""
        if predicted_s < LEAST_S:
            return
        seen = min(HIGH, max(LOW, observed_s / predicted_s))
        self.count += 1
        gain = max(GAIN, 1.0 / (self.count + 1))
        kept = self._left(now) * (1.0 - gain)
        self._learned = self._learned * kept + seen * gain
        self._weight = self._weight * kept + gain
        self._at = now

    def _left(self, now: float) -> float:
        """Share of what was learned that has not faded."""
        left: float = 0.5 ** (max(0.0, now - self._at) / self.half_life_s)
        return left

    def stats(self, now: float, prior: float = 1.0) -> RatioStats:
        return RatioStats(self.at(now, prior), self.count, now - self._at if self.count else 0.0)


@dataclass(slots=True)
class _Endpoint:
    """Ratios of an endpoint, or of all."""

    prefill: Ratio = field(default_factory=Ratio)
    ttft: Ratio = field(default_factory=Ratio)
    sends: Ratio = field(default_factory=lambda: Ratio(HALF_LIFE_S))
    store: Ratio = field(default_factory=lambda: Ratio(HALF_LIFE_S))
    decode_s: float = 0.0
    decodes: int = 0


_NEW = _Endpoint()
"""Of an endpoint of which nothing was observed; never written."""


class Speed(NamedTuple):
    """How fast an endpoint is believed to be now."""

    engine: EngineModel
    """The pool's engine, slowed down or sped up by what was observed there."""
    decode_s: float
    """Mean seconds that a request decodes there; 0: unknown."""
    ttft_ratio: float
    """Observed / predicted seconds to the first token."""


class Calibration:
    """Ratios of a pool."""

    def __init__(self, engine: EngineModel = H20_30B) -> None:
        """`engine`: the pool's engines as believed before anything is observed."""
        self.engine = engine
        self.transfers = 0
        """Number of transfers between endpoints that were observed."""
        self._speeds: dict[str, tuple[float, Speed]] = {}
        """By address: how fast it is believed to be, and until when that holds."""
        self._pool = _Endpoint()
        """All observations of the pool's endpoints, also of those that left."""
        self._endpoints: dict[str, _Endpoint] = {}
        self._links: dict[tuple[str, str], Ratio] = {}

    # -- observations ------------------------------------------------------------------------------

    def prefill(self, address: str, observed_s: float, predicted_s: float, now: float) -> None:
        """A prefill took `observed_s` alone on the endpoint."""
        self._speeds.clear()
        self._pool.prefill.observe(observed_s, predicted_s, now)
        self._endpoint(address).prefill.observe(observed_s, predicted_s, now)

    def ttft(self, address: str, observed_s: float, predicted_s: float, now: float) -> None:
        """From a decision to the end of its prefill, queue included."""
        self._speeds.clear()
        self._pool.ttft.observe(observed_s, predicted_s, now)
        self._endpoint(address).ttft.observe(observed_s, predicted_s, now)

    def decoded(self, address: str, seconds: float) -> None:
        """A request decoded for so long, first token to last."""
        endpoint = self._endpoint(address)
        endpoint.decodes += 1
        gain = max(GAIN, 1.0 / endpoint.decodes)
        endpoint.decode_s += (seconds - endpoint.decode_s) * gain
        self._speeds.pop(address, None)

    def transfer(self, source: str, target: str, observed_s: float, predicted_s: float, now: float) -> None:
        """`target` pulled from `source`."""
        self.transfers += 1
        self._pool.sends.observe(observed_s, predicted_s, now)
        self._endpoint(source).sends.observe(observed_s, predicted_s, now)
        self._links.setdefault((source, target), Ratio(HALF_LIFE_S)).observe(observed_s, predicted_s, now)

    def store(self, address: str, observed_s: float, predicted_s: float, now: float) -> None:
        """The endpoint loaded KV from the shared store."""
        self._speeds.clear()
        self._pool.store.observe(observed_s, predicted_s, now)
        self._endpoint(address).store.observe(observed_s, predicted_s, now)

    def forget(self, address: str) -> None:
        """It left the pool: whoever comes back under its address starts anew."""
        self._speeds.clear()
        self._endpoints.pop(address, None)
        for link in [link for link in self._links if address in link]:
            del self._links[link]

    # -- questions ---------------------------------------------------------------------------------

    def prefill_ratio(self, address: str, now: float) -> float:
        return self._known(address).prefill.at(now, self._pool.prefill.at(now))

    def ttft_ratio(self, address: str, now: float) -> float:
        return self._known(address).ttft.at(now, self._pool.ttft.at(now))

    def store_ratio(self, address: str, now: float) -> float:
        return self._known(address).store.at(now, self._pool.store.at(now))

    def decode_s(self, address: str) -> float:
        return self._known(address).decode_s

    def speed(self, address: str, now: float) -> Speed:
        """How fast the endpoint is believed to be. Kept for SPEED_S, or until something is observed."""
        until, speed = self._speeds.get(address, (-inf, None))
        if speed is None or now >= until:
            speed = self._speed(address, now)
            self._speeds[address] = (now + SPEED_S, speed)
        return speed

    def _speed(self, address: str, now: float) -> Speed:
        prefill = round(self.prefill_ratio(address, now), 2)
        store = round(self.store_ratio(address, now), 1)
        engine = self.engine
        if prefill != 1.0:
            engine = engine.scaled(prefill)
        if store != 1.0:
            engine = replace(engine, store_bytes_per_s=engine.store_bytes_per_s / store)
        return Speed(engine, self.decode_s(address), self.ttft_ratio(address, now))

    def slowdown(self, source: str, target: str, now: float) -> float:
        """Of a transfer from `source` to `target`."""
        link, sends = self._links.get((source, target)), self._known(source).sends
        known = link if link is not None and link.count else sends if sends.count else self._pool.sends
        return known.at(now)

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
        """Every link that was used: (source, target) → ratio."""
        return {link: ratio.stats(now) for link, ratio in self._links.items()}

    def _known(self, address: str) -> _Endpoint:
        return self._endpoints.get(address, _NEW)

    def _endpoint(self, address: str) -> _Endpoint:
        return self._endpoints.setdefault(address, _Endpoint())

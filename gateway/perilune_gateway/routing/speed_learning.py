"""Teaches the calibration how fast endpoints prefill, fetch KV and decode, from requests that ran there.

An engine prefills one prompt after the other, and short ones together in one step. So prefills that end
together are one observation. They ran since the step before them ended, or since the first of them was sent;
then that one's overhead came first. (One by one, all but the first would seem to take no time, and an
endpoint would look the faster, the more prompts wait there.) A step that ends while prompts of other gateways
wait there teaches nothing of prefill, because the endpoint may have spent part of it on those. Where KV was
fetched, fetching took the time that prefill and overhead do not explain.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from perilune_gateway.model import Outcome
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.facts import EndpointLeft
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.loads import Loads
from perilune_gateway.state.request_facts import Ended, Prefilled

TOGETHER_S = 0.002
"""Prefills that end within so many seconds of each other are of one step. No step with a prefill is shorter
on a GPU of today, and what one step announces is read in less."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """Prefills of one endpoint that end together."""

    before: float
    """When the step before it ended."""
    ended: float
    sent_at: float = inf
    """When the first of its requests was sent."""
    overhead_s: float = 0.0
    """Predicted overhead of that one."""
    prefill_s: float = 0.0
    """Predicted seconds of all prefills."""
    tells: bool = True
    """Whether nothing else than these prefills took time, as far as it is known."""


class SpeedLearning:
    """What the requests of one pool show of its endpoints' speed."""

    def __init__(self, calibration: Calibration, loads: Loads) -> None:
        self._calibration = calibration
        self._loads = loads
        self._steps: dict[str, _Step] = {}
        """Address → the step there that may end further prefills. It is learnt from once it is over."""
        self._ended: dict[str, float] = {}
        """Address → when the last step before that ended."""

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self._steps.pop(fact.address, None)
        self._ended.pop(fact.address, None)

    def on_prefilled(self, fact: Prefilled) -> None:
        if not fact.is_there:
            return
        request, now, known = fact.request, fact.now, self._calibration
        target, forecast = request.target, request.forecast
        step = self._step(target, now)
        if self._loads.at(target).prefilling > self._loads.own(target).prefilling:
            step.tells = False  # it may have prefilled for other gateways
        if not request.learns:
            step.tells = False
        elif forecast.fetch_s:
            step.tells = False
            if step.before < request.sent_at:  # otherwise it may have fetched while others were prefilled
                self._fetched(request, now)
        elif forecast.prefill_s:
            step.prefill_s += forecast.prefill_s - (known.engine.begin_s if step.prefill_s else 0.0)
            if request.sent_at < step.sent_at:
                step.sent_at, step.overhead_s = request.sent_at, forecast.overhead_s
            overhead_s = forecast.overhead_s * known.prefill_ratio(target, now)
            known.ttft(target, now - request.sent_at, forecast.ttft_s + overhead_s, now)

    def _step(self, target: str, now: float) -> _Step:
        """Return the step that ends prefills now."""
        self._close(now)
        step = self._steps.get(target)
        if step is None:
            step = self._steps[target] = _Step(before=self._ended.get(target, 0.0), ended=now)
        step.ended = now
        return step

    def _close(self, now: float) -> None:
        """Learn from the steps that are over."""
        for target, step in [each for each in self._steps.items() if now - each[1].ended > TOGETHER_S]:
            del self._steps[target]
            self._ended[target] = step.ended
            self._learn(target, step)

    def _learn(self, target: str, step: _Step) -> None:
        if not step.tells or not step.prefill_s:
            return
        if step.before <= step.sent_at:
            took_s, predicted_s = step.ended - step.sent_at, step.overhead_s + step.prefill_s
        else:
            took_s, predicted_s = step.ended - step.before, step.prefill_s
        self._calibration.prefill(target, took_s, predicted_s, step.ended)

    def _fetched(self, request: InFlight, now: float) -> None:
        target, forecast, known = request.target, request.forecast, self._calibration
        rest_s = forecast.prefill_s * known.prefill_ratio(target, now) + forecast.overhead_s
        took_s = max(0.001, now - request.sent_at - rest_s)
        if forecast.peer:
            known.transfer(forecast.peer, target, took_s, forecast.fetch_s, now)
        else:
            known.store(target, took_s, forecast.fetch_s, now)

    def on_ended(self, fact: Ended) -> None:
        request = fact.request
        self._close(fact.now)
        completed = fact.ending.outcome is Outcome.COMPLETED
        if completed and fact.is_there and request.prefilled_at:
            self._calibration.decoded(request.target, fact.now - request.prefilled_at)

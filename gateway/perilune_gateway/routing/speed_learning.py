"""Teaches the calibration how fast endpoints prefill, fetch KV and decode, from requests that ran there.

An engine prefills one prompt after the other. So a prefill ran since the one before it ended, or since its
own start; then the request's overhead came first. Where KV was fetched, the time that prefill and overhead do
not explain is that of fetching.
"""

from __future__ import annotations

from perilune_gateway.model import Outcome
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.facts import EndpointLeft
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.request_facts import Ended, Prefilled


class SpeedLearning:
    """What the requests of one pool show of its endpoints' speed."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._prefilled_at: dict[str, float] = {}
        """Address → when the last prefill there ended."""

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self._prefilled_at.pop(fact.address, None)

    def on_prefilled(self, fact: Prefilled) -> None:
        if not fact.is_there:
            return
        request, now, known = fact.request, fact.now, self._calibration
        target, forecast = request.target, request.forecast
        before = self._prefilled_at.get(target, 0.0)
        self._prefilled_at[target] = now
        if not request.learns:
            return
        if forecast.fetch_s:
            if before < request.sent_at:  # otherwise it may have fetched while others were prefilled
                self._fetched(request, now)
        elif forecast.prefill_s:
            if before <= request.sent_at:
                alone_s, predicted_s = now - request.sent_at, forecast.overhead_s + forecast.prefill_s
            else:
                alone_s, predicted_s = now - before, forecast.prefill_s
            overhead_s = forecast.overhead_s * known.prefill_ratio(target, now)
            known.prefill(target, alone_s, predicted_s, now)
            known.ttft(target, now - request.sent_at, forecast.ttft_s + overhead_s, now)

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
        completed = fact.ending.outcome is Outcome.COMPLETED
        if completed and fact.is_there and request.prefilled_at:
            self._calibration.decoded(request.target, fact.now - request.prefilled_at)

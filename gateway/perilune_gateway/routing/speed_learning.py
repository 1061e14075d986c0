"""Teaches the calibration how fast endpoints prefill, fetch KV and decode, from requests that ran there.

An engine prefills one prompt after the other. So a prefill ran since the one before it ended, or since its
own start; then the request's overhead came first. Where KV was fetched, the time that prefill and overhead do
not explain is that of fetching.
"""

from __future__ import annotations

from perilune_gateway.routing.running import Running
from perilune_gateway.state.calibration import Calibration


class SpeedLearning:
    """What the requests of one pool tell of its endpoints' speed."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._prefilled_at: dict[str, float] = {}
        """Address → when the last prefill there ended."""

    def forget(self, address: str) -> None:
        """The endpoint left the pool."""
        self._prefilled_at.pop(address, None)

    def prefilled(self, running: Running, now: float) -> None:
        """The request's prefill has just ended."""
        target, forecast, known = running.target, running.forecast, self._calibration
        before = self._prefilled_at.get(target, 0.0)
        self._prefilled_at[target] = now
        if not running.learns:
            return
        if forecast.fetch_s:
            if before < running.sent_at:  # otherwise it may have fetched while others were prefilled
                self._fetched(running, now)
        elif forecast.prefill_s:
            if before <= running.sent_at:
                alone_s, predicted_s = now - running.sent_at, forecast.overhead_s + forecast.prefill_s
            else:
                alone_s, predicted_s = now - before, forecast.prefill_s
            overhead_s = forecast.overhead_s * known.prefill_ratio(target, now)
            known.prefill(target, alone_s, predicted_s, now)
            known.ttft(target, now - running.sent_at, forecast.ttft_s + overhead_s, now)

    def _fetched(self, running: Running, now: float) -> None:
        target, forecast, known = running.target, running.forecast, self._calibration
        rest_s = forecast.prefill_s * known.prefill_ratio(target, now) + forecast.overhead_s
        took_s = max(0.001, now - running.sent_at - rest_s)
        if forecast.peer:
            known.transfer(forecast.peer, target, took_s, forecast.fetch_s, now)
        else:
            known.store(target, took_s, forecast.fetch_s, now)

    def completed(self, running: Running, now: float) -> None:
        """The request has ended well, and its endpoint is still in the pool."""
        if running.prefilled_at:
            self._calibration.decoded(running.target, now - running.prefilled_at)

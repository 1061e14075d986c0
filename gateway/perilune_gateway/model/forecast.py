"""What an endpoint has to do before the first token of a request that was sent there."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace


class PrefillForecast(Struct, frozen=True, gc=False, kw_only=True):
    """The work before the first token. Seconds are without calibration unless they say otherwise."""

    held_tokens: int = 0
    """Prompt tokens that the endpoint has, or loads or pulls, instead of computing them."""
    uncached_tokens: int = 0
    """Prompt tokens that it computes."""
    calibrated_s: float = 0.0
    """Seconds of the prefill alone, by the endpoint's measured speed."""
    prefill_s: float = 0.0
    """Seconds of the prefill alone."""
    fetch_s: float = 0.0
    """Seconds of pulling or loading KV before it, or until another endpoint has prefilled. 0 if nothing is
    fetched."""
    store_s: float = 0.0
    """Seconds of reading the shared store, by the endpoint's measured speed. It reads for one request after
    the other."""
    peer: str = ""
    """The endpoint that KV is pulled from. Empty if it comes from the shared store, if from anywhere."""
    overhead_s: float = 0.0
    """Seconds besides prefill and decode."""
    ttft_s: float = 0.0
    """Seconds of queue, fetching and calibrated prefill."""

    @property
    def alone_s(self) -> float:
        """Seconds of fetching and prefill."""
        return self.prefill_s + self.fetch_s

    @property
    def engine_s(self) -> float:
        """Seconds for which it keeps the endpoint from the prefills of others, by its measured speed."""
        return self.calibrated_s + self.store_s

    def fetched(self) -> PrefillForecast:
        """Return the forecast once the KV is there."""
        return replace(self, fetch_s=0.0, ttft_s=self.ttft_s - self.fetch_s)


NO_PREFILL = PrefillForecast()

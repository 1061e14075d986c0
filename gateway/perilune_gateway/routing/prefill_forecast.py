"""Predicts what an endpoint has to do before the first token of a request that was sent there.

Pure. `forecast` says it of a decision, `forecast_alone` of the same endpoint if no other one sends KV.
"""

from __future__ import annotations

from msgspec.structs import replace

from perilune_gateway.model import Candidate, Decision, EngineModel
from perilune_gateway.model.forecast import PrefillForecast


def forecast(
    decision: Decision,
    chosen: Candidate,
    prompt_tokens: int,
    believed: EngineModel,
    *,
    from_host: bool = False,
) -> PrefillForecast:
    """Predict the work of the decision's target, which is `chosen`. `believed`: the engine's assumed speed,
    without calibration. `from_host`: as in `Prefix`."""
    held, fetch_s = _fetching(decision, chosen, believed, from_host)
    cached = prompt_tokens if decision.prefill else held
    uncached = prompt_tokens - cached
    calibrated_s = chosen.engine.prefill_s(uncached, cached)
    return PrefillForecast(
        held_tokens=held,
        uncached_tokens=uncached,
        calibrated_s=calibrated_s,
        prefill_s=believed.prefill_s(uncached, cached),
        fetch_s=fetch_s,
        store_s=_reading(decision, chosen),
        peer=decision.replicate_from,
        overhead_s=believed.request_overhead_s(prompt_tokens),
        ttft_s=chosen.load.pending_prefill_s + fetch_s + calibrated_s,
    )


def forecast_alone(
    decision: Decision, chosen: Candidate, prompt_tokens: int, believed: EngineModel
) -> PrefillForecast:
    """Predict the work of the decision's target if no other endpoint sends KV."""
    alone = replace(decision, prefill="", replicate_from="", cached_tokens=0)
    return forecast(alone, chosen, prompt_tokens, believed)


def _fetching(
    decision: Decision, chosen: Candidate, believed: EngineModel, from_host: bool
) -> tuple[int, float]:
    """Return (prompt tokens that the target need not prefill, seconds of fetching them). They come from the
    peer that the decision names, or else from the shared store: an engine looks there by itself, whatever the
    policy expected."""
    device, host, stored = chosen.overlap
    if decision.prefill:
        return device, decision.estimated_ttft_s
    here, peer = max(device, decision.cached_tokens), decision.replicate_from
    if peer and peer in chosen.links:
        bandwidth = chosen.links[peer].bandwidth_bytes_per_s
        if from_host:
            return here, believed.transfer_s(here - host, bandwidth) + believed.host_s(here - device)
        return here, believed.transfer_s(here - device, bandwidth)
    if stored > max(device, host):
        return max(here, stored), believed.store_s(stored - device)
    return max(here, host), 0.0


def _reading(decision: Decision, chosen: Candidate) -> float:
    """Return the seconds of reading the shared store, if the KV comes from there."""
    device, host, stored = chosen.overlap
    if decision.prefill or decision.replicate_from in chosen.links or stored <= max(device, host):
        return 0.0
    return chosen.engine.store_s(stored - device)

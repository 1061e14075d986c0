"""Faults of a simulated fleet, and errors in what the gateway believes about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from perilune_api.pool import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a simulation. By default the fleet has none, but the gateway's beliefs start wrong."""

    link_factor: float = 1.0
    """Factor on the duration of every transfer."""
    outlier_share: float = 0.0
    """Share of the transfers that take `outlier_factor` times as long."""
    outlier_factor: float = 20.0
    dead_endpoint: int = -1
    """Number of the endpoint that fails; -1: none."""
    dead_at_s: float = 0.0
    """When `dead_endpoint` fails, in seconds. Its requests fail, from which the gateway learns of it."""
    drain_endpoint: int = -1
    """Number of the endpoint that drains, and goes on doing so; -1: none."""
    drain_at_s: float = 0.0
    """When `drain_endpoint` begins to drain, in seconds."""
    rolling_at_s: float = -1.0
    """When a rolling update of all endpoints begins, in seconds; -1: never. See `drains.py`."""
    event_lag_s: float = 0.0
    """Seconds after which the gateway learns of KV events and of the ends of prefills."""
    token_error: float = 0.0
    """Largest relative error of the gateway's estimates of prompt lengths, drawn per session. With 0 it knows
    the tokens. Where it estimates, it matches no prefix, but remembers the length of the session's
    context."""
    engine_belief: float = 1.3
    """Ratio of believed to true seconds of prefill, at the start."""
    speed_spread: float = 1.0
    """Each engine's compute times are multiplied by a factor of its own, drawn log-uniformly between 1 /
    `speed_spread` and `speed_spread`. The gateway starts with the belief that all engines are equal."""
    step_noise: float = 0.0
    """Standard deviation of the logarithm of a factor on each step that prefills; the factor's mean is 1.
    Decode steps have no noise, since it evens out over many steps."""
    link_belief: float = 0.7
    """Ratio of believed to true seconds of a transfer on a link without faults, at the start. Below 1, the
    gateway believes that links are faster than they are."""


NAMES = {
    "slow-links": "link_factor",
    "outliers": "outlier_share",
    "outlier-factor": "outlier_factor",
    "dead": "dead_endpoint",
    "drain": "drain_endpoint",
    "rolling": "rolling_at_s",
    "lag": "event_lag_s",
    "estimates": "token_error",
    "engine-belief": "engine_belief",
    "link-belief": "link_belief",
    "unequal": "speed_spread",
    "noise": "step_noise",
}
"""Name of a fault in `--faults` → field of `Faults`."""
DEFAULTS = {
    "slow-links": "10",
    "outliers": "0.05",
    "dead": "0@60",
    "drain": "0@60",
    "rolling": "60",
    "lag": "2",
    "estimates": "0.2",
    "unequal": "1.5",
    "noise": "0.2",
}
"""Value of a fault that is named without one."""
_FROM_0_TO_1 = {"outlier_share", "token_error"}
_AT = {"dead_endpoint": "dead_at_s", "drain_endpoint": "drain_at_s"}
"""Field for an endpoint's number → field for the time."""
_MAY_BE_0 = _FROM_0_TO_1 | {*_AT, *_AT.values(), "rolling_at_s", "event_lag_s", "step_noise"}


def parse(text: str) -> Faults:
    """Parse faults such as `slow-links=10,outliers=0.05,dead=3@120,drain=0@60,lag=2`. A name without a value
    takes its default. Raises SpecError for an unknown name and a wrong value."""
    faults = Faults()
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        field = NAMES.get(name)
        value = value or DEFAULTS.get(name, "")
        if field is None or not value:
            raise SpecError(f"{part}: a fault is one of {', '.join(NAMES)}, as name=value - at `--faults`")
        value, _, at_s = value.partition("@")
        changes = {field: _number(part, field, value)}
        if at := _AT.get(field):
            changes |= {field: int(changes[field]), at: _number(part, at, at_s or _default_time(name))}
        elif at_s:
            raise SpecError(f"{part}: only `dead` and `drain` have a time - at `--faults`")
        faults = replace(faults, **changes)  # type: ignore[arg-type]
    return faults


def _default_time(name: str) -> str:
    return DEFAULTS[name].partition("@")[2]


def _number(part: str, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SpecError(f"{part}: not a number - at `--faults`") from None
    most = 1.0 if field in _FROM_0_TO_1 else inf
    if not (0.0 <= value <= most and value < inf and (value or field in _MAY_BE_0)):
        limits = "from 0 to 1" if most == 1.0 else "0 or above" if field in _MAY_BE_0 else "above 0"
        raise SpecError(f"{part}: must be {limits} - at `--faults`")
    if field in _AT and not value.is_integer():
        raise SpecError(f"{part}: must be an endpoint's number, from 0 - at `--faults`")
    if field == "speed_spread" and value < 1.0:
        raise SpecError(f"{part}: must be 1 or above - at `--faults`")
    return value

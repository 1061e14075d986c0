"""`spec.routing.limits` and `.ejection`: which requests are refused, and which endpoints get none."""

from typing import Annotated

import msgspec
from msgspec import Meta

from perilune_api.fields import Positive, Seconds, Struct


class Limits(Struct, frozen=True, kw_only=True):
    """When the gateway refuses a request instead of routing it."""

    max_body_bytes: Positive = 32 * 1024 * 1024
    """Maximum size of a request body in bytes. A larger one is refused with 413."""
    max_pending_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuses a request with 429 when every endpoint has more seconds of queued prefill than this. 0 is no
    limit."""
    start_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Seconds that an endpoint takes to start. While no endpoint is ready, requests are refused with 429 and
    told to come back after the rest of that time, at most 60 s. 0: they are refused with 503; in a pool with
    `scaling.minReplicas: 0` it stands for 60."""
    ttft_slo_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuses a request with 429 when every endpoint's predicted time to the first token is longer than this,
    in seconds. 0 is no limit. A request may set its own limit with names.SLO_TTFT_HEADER."""
    tpot_slo_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuses a request with 429 when every endpoint's predicted mean time per output token is longer than
    this, in seconds. 0 is no limit. A request may set its own limit with names.SLO_TPOT_HEADER."""
    objectives: dict[str, Annotated[int, Meta(ge=-8, le=8)]] = msgspec.field(default_factory=dict)
    """Priority level of each objective; a request names its objective with names.OBJECTIVE_HEADERS. Each
    level above 0 doubles the queue at which the gateway refuses the request, each level below 0 halves it."""
    decision_seconds: Seconds = 1.5
    """Maximum seconds that tokenizing a prompt may take. After that, the gateway routes the request by an
    estimate of its length. Must stay below Envoy's messageTimeout, which is 2 s on Kubernetes."""


class Ejection(Struct, frozen=True):
    """When an endpoint gets no requests for a while because its answers fail or come far too late, although
    its metrics can be read. At least half of the pool's endpoints always stay. After a pause one request is
    sent there as a trial."""

    enabled: bool = True
    """Whether endpoints are ejected."""
    failure_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Ejects an endpoint when at least this share of its latest answers failed (status 500 and above except
    501, and with `engine.apiKey` 401 and 403) or came too late, at least this share of its tenants see that,
    and the other endpoints do less than half as badly."""
    slow_factor: Annotated[float, Meta(ge=1)] = 1.5
    """A request is too late when its first token takes this many times longer than that of 99 of 100 requests
    of the pool takes, compared with each request's predicted time."""
    pause_seconds: Seconds = 2.0
    """Seconds from an ejection to the first trial. Each failed trial doubles the pause, up to three times its
    first length."""
    session_failures: Positive = 3
    """A session leaves its host after this many failed answers in a row, whether the host is ejected or
    not."""

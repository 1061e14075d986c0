"""`spec.routing.disaggregation` and `.pull`: when an endpoint gets KV from another one."""

from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Positive, Seconds, Struct


class Disaggregation(Struct, frozen=True):
    """When a prompt is prefilled on another endpoint than the one that decodes. Has an effect only where
    endpoints have the role `prefill`."""

    local_tokens: Annotated[int, Meta(ge=0)] = 1000
    """A prompt is prefilled at its decoding endpoint if at most this many of its tokens are not cached
    there."""
    queue: Positive = 8
    """Number of prompts at a prefill endpoint that wait or are being prefilled, from which on it gets no
    more. While all prefill endpoints have so many, prompts are prefilled where they are decoded."""
    max_seconds: Seconds = 60.0
    """A prompt whose remote prefill would take more seconds than this, queue included, is prefilled where it
    is decoded. At most half of the time for which engines keep KV that is not fetched
    (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`). The operator sets that time by this field, so a higher value may
    roll the engines."""
    coming_requests: Annotated[int, Meta(ge=0)] = 0
    """Number of requests that count as delayed by a prefill where the prompt is decoded, in addition to those
    in flight there. With 0 an endpoint without requests prefills by itself, and first tokens come soonest.
    More of them keep prefills away from endpoints that decode, which makes times between tokens steadier.
    With 1000 only localTokens, queue, maxSeconds and a request's SLO lead to a prefill there."""
    accept_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Seconds for which the gateway holds a request until the prefill endpoint has accepted its prompt. After
    that, the prompt is prefilled where it is decoded. Together with `limits.decisionSeconds`, it must stay
    below Envoy's messageTimeout, which is 2 s on Kubernetes."""


class Pull(Struct, frozen=True):
    """When an endpoint fetches what another one caches of a request's prompt. Has an effect only where
    engines hand KV over to each other, or read each other's host memory (`mooncake.transfer: handoff` or
    `offload` on Kubernetes)."""

    enabled: bool = True
    """Whether the gateway lets endpoints fetch KV for a request."""
    max_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.4
    """Where engines hand KV over: seconds for which the gateway holds a request at the most while its KV is
    fetched. A fetch that would take longer is not begun; one that does is given up, and the endpoint computes
    the prompt itself. Together with `limits.decisionSeconds`, it must stay below Envoy's messageTimeout,
    which is 2 s on Kubernetes. Engines that read each other's host memory fetch while they have the request,
    so nothing is held."""

"""A request while it is being decided: its prompt, its session, and the endpoints that may serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec import Struct, field

from perilune_gateway.model import (
    NO_PREFIX,
    Candidate,
    Identity,
    Prefix,
    RequestHead,
    Step,
    TokenSource,
    Unpulled,
    Unsplit,
)
from perilune_gateway.model.handoff import Content
from perilune_gateway.routing.trial import Place
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.session import Session


class StepTimer:
    """Measures how many microseconds each step of a decision takes."""

    __slots__ = ("_clock", "_last", "_started", "us")

    def __init__(self, clock: Callable[[], float], started: float | None = None) -> None:
        """Begin to measure. `started`: a reading of `clock`; None means now."""
        self._clock = clock
        self._started = self._last = clock() if started is None else started
        self.us: dict[str, float] = {}

    def lap(self, step: Step) -> None:
        """Record that the step has just ended; it began when the one before ended."""
        now = self._clock()
        self.us[step] = (now - self._last) * 1e6
        self._last = now

    def total(self) -> dict[str, float]:
        """Return all steps, with the time since the start as the total."""
        self.us[Step.TOTAL] = (self._clock() - self._started) * 1e6
        return self.us


class TimeAndDice(Struct, frozen=True):
    """What comes into a decision from nowhere else."""

    clock: Callable[[], float]
    """Gives monotonic seconds."""
    stopwatch: Callable[[], float]
    """Gives the seconds by which steps are timed."""
    dice: Random


class Prompt(Struct, frozen=True, gc=False, kw_only=True):
    """The facts known about a prompt. Before the body was read, only an estimate of its length."""

    tokens: int
    source: TokenSource
    blocks: Sequence[int] = ()
    """Chained hashes of its full KV blocks; empty if the body was not read."""
    model: str = ""
    """The model that the body names; empty if the body was not read."""
    output_tokens: int = 0
    """The most tokens that the answer may have; 0 if the request does not say."""
    priority: int = 0
    body_bytes: int = 0
    cache_key: str = ""
    """OpenAI's `prompt_cache_key`."""
    cache_salt: str = ""
    """The salt that the gateway derived from the tenant. Empty if the body's own counts."""
    chained: bool = False
    """Whether it names an earlier response, which only one engine's process has."""
    partial: bool = False
    """Whether only what is new is known of it, since it names an earlier response. Then its blocks are those
    of the session's context."""
    lead: int = 0
    """Hash of what stands before its messages, if it or a later one may name an earlier response."""
    keeps_lead: bool = True
    """Whether a request that continues its response begins with the same."""
    names_response: bool = False
    """Whether the gateway chooses the id of the response, see aliases.py."""
    unsplit: Unsplit | None = None
    """Why no other endpoint can prefill it; None if one can."""
    rewritten: bool = False
    """Whether the session's answers may be written in it otherwise than they were generated."""


NO_PROMPT = Prompt(tokens=0, source=TokenSource.ESTIMATE)


class RequestContext(Struct, gc=False, kw_only=True):
    """Everything that a decision is taken from."""

    head: RequestHead
    now: float
    timer: StepTimer
    identity: Identity
    session: Session | None
    eligible: Sequence[EndpointView] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Endpoints that may not be chosen: address → name of the admission check that failed."""
    prompt: Prompt = NO_PROMPT
    holder: str = ""
    """Address of the endpoint that has the earlier response which the request names. Empty if
    none is known."""
    candidates: Sequence[Candidate] = ()
    prefix: Prefix = NO_PREFIX
    unpulled: Unpulled | None = None
    """Why no endpoint can fetch the prefix from another one; None if one can."""
    content: Content | None = None
    """What the chosen endpoint fetches from another one; None if nothing."""
    seed: int = 0
    """The policy's random draws follow from this number, so a recorded decision can be taken again."""
    queued_s: float = 0.0
    """Seconds for which the session, which is new, waited to begin."""
    place: Place | None = None
    """Where it counts in the trial of a canary. None if it counts nowhere."""
    by_canary: bool = False
    """Whether the canary's policy decides."""
    fell_back: bool = False
    """Whether another policy decided in its place."""

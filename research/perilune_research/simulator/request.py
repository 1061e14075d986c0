"""The requests of a simulation: those of clients, and legs, by which the gateway has KV handed over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf

from perilune_gateway.model import Reason
from perilune_lab.simulate.workload import Task


class SimulatedRequest:
    """One request: what the gateway decided about it, its progress in the engine, and what was measured.

    Times are in seconds since the simulation began; `first_token_s` and `finished_s` are inf until they
    happen. Endpoints are numbers; -1 means none.
    """

    __slots__ = (
        "answer_run",
        "cached_tokens",
        "computed",
        "depth",
        "due_s",
        "endpoint",
        "expected_ttft_s",
        "failed",
        "fetched_tokens",
        "finish_step",
        "finished_s",
        "first_token_s",
        "held_s",
        "host_tokens",
        "hot",
        "joined_step",
        "leg_cached_tokens",
        "loaded_s",
        "moved_from",
        "moved_tokens",
        "number",
        "output_tokens",
        "predicted_s",
        "preemptions",
        "prefill_endpoint",
        "prefill_known",
        "priority",
        "produced",
        "prompt_tokens",
        "ready_s",
        "reason",
        "refusals",
        "rejected",
        "routed_s",
        "run",
        "source",
        "store_tokens",
        "submitted_s",
        "task",
        "transfer_ends_s",
        "transfer_s",
        "uncached_tokens",
    )

    def __init__(self, task: Task, number: int, due_s: float, now: float) -> None:
        self.task = task
        self.number = number
        """Number in the order of submission."""
        self.run = task.run
        self.answer_run = task.answer_run
        self.prompt_tokens = task.prompt_tokens
        self.output_tokens = task.output_tokens
        self.due_s = due_s
        self.submitted_s = now
        """When the client first sent it."""
        self.refusals = 0
        """How many times session admission refused it."""
        self.routed_s = now
        """When the gateway sent it to its endpoint."""
        self.held_s = 0.0
        """Seconds for which the gateway held it while its endpoint was to fetch KV."""
        self.endpoint = -1
        self.prefill_endpoint = -1
        """The endpoint that prefills: `endpoint`, unless prefill and decode are split."""
        self.prefill_known = False
        """Whether the gateway knows that the prefill has ended."""
        self.leg_cached_tokens = -1
        """Tokens that were cached where another endpoint prefilled; -1 if none did."""
        self.reason: Reason | None = None
        self.moved_from = -1
        self.source = -1
        """Endpoint that sends KV of the prefix to `endpoint`."""
        self.hot = False
        """Whether the session's host was hot at submission."""
        self.priority = 0
        self.uncached_tokens = 0
        """Tokens to be prefilled, as the gateway predicted when it routed the request."""
        self.predicted_s = 0.0
        """Seconds of the prefill, as the gateway predicted them."""
        self.expected_ttft_s = 0.0
        """TTFT in seconds, as the gateway predicted it."""
        self.depth = task.prompt_tokens
        """Leading tokens whose KV must exist before the next token can."""
        self.computed = 0
        """Leading tokens whose KV exists or is being computed."""
        self.cached_tokens = 0
        """Leading tokens that were cached when the engine first admitted the request."""
        self.fetched_tokens = 0
        """Leading tokens that will be cached once the transfer or load has ended."""
        self.host_tokens = 0
        """Tokens loaded from the endpoint's own host memory."""
        self.store_tokens = 0
        """Tokens loaded from the shared store."""
        self.transfer_s = 0.0
        """Seconds of the transfer or load, including its wait."""
        self.transfer_ends_s = 0.0
        """When an overlapped transfer ends."""
        self.loaded_s = 0.0
        """Seconds to load what `source` sent from the endpoint's host memory to its device."""
        self.moved_tokens = 0
        """Tokens that `source` sends."""
        self.ready_s = 0.0
        """When the engine can admit the request."""
        self.first_token_s = inf
        self.finished_s = inf
        self.produced = 0
        self.joined_step = 0
        self.finish_step = 0
        self.preemptions = 0
        self.failed = False
        self.rejected = False

    @property
    def succeeded(self) -> bool:
        """Return whether the request, which has ended, succeeded."""
        return not (self.failed or self.rejected)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first. Raise ZeroDivisionError for a single token."""
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.submitted_s


class Leg(SimulatedRequest, ABC):
    """A request of one token that the gateway itself sends to an engine, so that it gives or takes KV."""

    __slots__ = ()

    @abstractmethod
    def prefilled(self) -> None:
        """Take note that its engine has computed what it did not hold."""

    @abstractmethod
    def finished(self) -> None:
        """Take note that its engine has answered."""

    @abstractmethod
    def lost(self) -> None:
        """Take note that its engine has died."""

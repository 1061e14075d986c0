"""One request of a simulation."""

from __future__ import annotations

from math import inf

from perilune_gateway.model import Reason
from perilune_research.simulator.workload import Task


class SimulatedRequest:
    """What the gateway decided, its way through the engine, and what was measured. Seconds since the
    simulation began; what has not happened is inf."""

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
        "host_tokens",
        "hot",
        "joined_step",
        "leg_cached_tokens",
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
        """When the client sent it first."""
        self.refusals = 0
        """How often session admission refused it."""
        self.routed_s = now
        """When the gateway chose the endpoint."""
        self.endpoint = -1
        self.prefill_endpoint = -1
        """The endpoint that prefills; equal to `endpoint` unless prefill and decode are split."""
        self.prefill_known = False
        """Whether the gateway knows that the prefill is over."""
        self.leg_cached_tokens = -1
        """Tokens cached for a prefill that ran on another endpoint."""
        self.reason: Reason | None = None
        self.moved_from = -1
        self.source = -1
        """Endpoint from which the prefix is pulled."""
        self.hot = False
        """Whether the session's host was hot at submission."""
        self.priority = 0
        self.uncached_tokens = 0
        """As the gateway believed it."""
        self.predicted_s = 0.0
        """Predicted seconds of the prefill."""
        self.expected_ttft_s = 0.0
        self.depth = task.prompt_tokens
        """Tokens whose KV must exist before the next token."""
        self.computed = 0
        self.cached_tokens = 0
        self.fetched_tokens = 0
        """Leading tokens that arrive over the network."""
        self.host_tokens = 0
        """Tokens loaded from the endpoint's own host memory."""
        self.store_tokens = 0
        self.transfer_s = 0.0
        self.transfer_ends_s = 0.0
        self.moved_tokens = 0
        """Tokens that came from `source`."""
        self.ready_s = 0.0
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
        """Whether an ended request succeeded."""
        return not (self.failed or self.rejected)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """TPOT of a request with at least two tokens."""
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.submitted_s

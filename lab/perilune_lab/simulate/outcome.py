"""What is known of a simulation: every turn with its times, and the statistics of the run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from perilune_gateway.model import Reason
from perilune_gateway.model.handoff import HandoffRecord
from perilune_lab.simulate.workload import Task


class PlayedRequest:
    """One turn of a session as it was played. Times are in seconds; inf for what has not happened."""

    __slots__ = (
        "abandoned",
        "cached_tokens",
        "due_s",
        "endpoint",
        "failed",
        "finished_s",
        "first_token_s",
        "gave_up",
        "hot",
        "leg_cached_tokens",
        "number",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "reason",
        "refusals",
        "rejected",
        "submitted_s",
        "task",
    )

    def __init__(self, task: Task, number: int, now: float) -> None:
        self.task = task
        self.number = number
        """Number in the order of submission."""
        self.prompt_tokens = task.prompt_tokens
        self.output_tokens = task.output_tokens
        self.due_s = self.submitted_s = now
        """When the client first sent it."""
        self.refusals = 0
        """How many times the gateway refused it."""
        self.abandoned = 0
        """How many times its client closed it, because no token came in time."""
        self.endpoint = -1
        """Number of the endpoint that served it; -1 for none."""
        self.reason: Reason | None = None
        self.hot = False
        """Whether the session's host was hot when the turn was decided."""
        self.cached_tokens = 0
        """Leading tokens that the endpoint did not compute."""
        self.leg_cached_tokens = -1
        """Leading tokens that the endpoint that prefilled for it did not compute; -1 if none did."""
        self.preemptions = 0
        self.first_token_s = self.finished_s = inf
        self.failed = False
        self.rejected = False
        """Whether its last try was refused."""
        self.gave_up = False
        """Whether its client closed its last try."""

    @property
    def tries(self) -> int:
        """How many times it was sent in vain."""
        return self.refusals + self.abandoned

    @property
    def is_last(self) -> bool:
        """Whether its session ends with it, because the client comes no more."""
        return self.rejected or self.gave_up

    @property
    def succeeded(self) -> bool:
        """Whether the turn, which has ended, succeeded."""
        return not (self.failed or self.rejected or self.gave_up)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first. Raises ZeroDivisionError for a single token."""
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.submitted_s


@dataclass(slots=True, kw_only=True)
class SimulatedOutcome:
    """The result of one simulation."""

    policy: str
    deployment: str
    """What the deployment is called."""
    addresses: list[str]
    """Addresses of the endpoints, in the order of their numbers."""
    requests: list[PlayedRequest] = field(default_factory=list)
    """Turns in the order of their ends."""
    moved_bytes: int = 0
    """Bytes of KV that went from engine to engine."""
    transfer_s: list[float] = field(default_factory=list)
    """Seconds of each transfer, with its wait."""
    queue_variance: list[float] = field(default_factory=list)
    """Variance of the queue length over endpoints, sampled evenly in time."""
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two tokens of one request, and the number of such gaps, after the warm-up."""
    handed_over: list[HandoffRecord] = field(default_factory=list)
    """The gateway's transfers of KV that have ended."""
    policy_faults: Counter[str] = field(default_factory=Counter)
    """Decisions that a policy of a package got wrong, by what was wrong."""
    read: int = 0
    """Number of requests whose body the gateway had to read."""
    preemptions: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds that the simulation took."""

    @property
    def transfers(self) -> Counter[str]:
        """Number of the gateway's transfers of KV that have ended, by reason and outcome."""
        return Counter(f"{record.move.reason} {record.outcome}" for record in self.handed_over)

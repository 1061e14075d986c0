"""Collects what a run shows: the client's results, the gateway's admin pages, the stack's deaths.

    run_load ──finished──▶ Watch ◀──poll── /api/nodes/stats, /api/decisions
                             └─▶ frame() (for live), queues, scheduling, notes() (for the report)

Cost: two small pages per poll, about 1 ms of the gateway's time with eight endpoints.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from perilune_gateway.model import MOVING
from perilune_lab import report
from perilune_lab.admin_pages import Seen, conclude, page, queues
from perilune_lab.demo import live
from perilune_lab.load.result import Result
from perilune_lab.processes.stack import Stack
from perilune_lab.quantiles import quantile


class Watch:
    """One policy's run. Times in frames are engine seconds."""

    def __init__(self, stack: Stack, policy: str, seconds: float) -> None:
        self.stack = stack
        self.policy = policy
        self.seconds = seconds
        self.results: list[Result] = []
        self.queues: list[list[float]] = []
        """Running + waiting of every endpoint, a row per poll."""
        self.scheduling: report.Scheduling | None = None
        self._nodes: Mapping[str, dict[str, Any]] = {}
        self._decisions: Sequence[dict[str, Any]] = ()
        self._names = {address: f"engine-{i}" for i, address in enumerate(stack.endpoints)}
        self._began = time.monotonic()

    def finished(self, result: Result) -> None:
        self.results.append(result)

    async def poll(self, http: aiohttp.ClientSession) -> None:
        """Read the admin pages. If the gateway does not answer, the last values stay."""
        try:
            nodes = (await page(http, "/api/nodes/stats"))["nodes"]
            self._decisions = (await page(http, "/api/decisions?n=5"))["decisions"]
        except (aiohttp.ClientError, TimeoutError):
            return
        self._nodes = {node["address"]: node for node in nodes}
        self.queues.append(queues(nodes))

    async def ask_scheduling(self, http: aiohttp.ClientSession) -> None:
        """Read the scheduling times of the gateway's last decisions; they stay None if it does not answer."""
        seen = Seen()
        await conclude(http, "", seen)  # `http` knows the address
        self.scheduling = seen.scheduling

    def frame(self) -> live.Frame:
        scale = self.stack.options.time_scale
        good = [result for result in self.results if result.succeeded]
        ttfts = sorted(self.ttft_s())
        rows = [self._row(address) for address in self.stack.endpoints]
        return live.Frame(
            policy=self.policy,
            elapsed_s=time.monotonic() - self._began,
            seconds=self.seconds,
            time_scale=scale,
            finished=len(good),
            failed=len(self.results) - len(good),
            open=sum(row.in_flight for row in rows),
            prompt_tokens=sum(result.prompt_tokens for result in good),
            cached_tokens=sum(result.cached_tokens or 0 for result in good),
            migrations=sum(result.reason in MOVING for result in good),
            ttft_p90_s=quantile(ttfts, 0.9) if ttfts else None,
            endpoints=rows,
            decisions=[self._decision(row) for row in self._decisions],
        )

    def ttft_s(self) -> list[float]:
        """Return the engine seconds to the first token of every request that succeeded."""
        scale = self.stack.options.time_scale
        return [r.ttft_s * scale for r in self.results if r.succeeded and r.ttft_s is not None]

    def notes(self) -> tuple[str, ...]:
        """Return the further notes about the run, a line each."""
        failed = Counter(result.error for result in self.results if not result.succeeded)
        return (
            *(
                f"{death.name} ({death.address}) {death.end} after {death.at - self._began:.0f} s;"
                " requests were routed around it"
                for death in self.stack.deaths
            ),
            *(f"{count} request{'s' * (count > 1)} failed: {error}" for error, count in failed.items()),
        )

    def _row(self, address: str) -> live.EndpointRow:
        name = self._names[address]
        dead = next((death.end for death in self.stack.deaths if death.name == name), "")
        node = self._nodes.get(address)
        if node is None:
            return live.EndpointRow(name=name, address=address, dead=dead)
        load, place = node["load"], node["place"]
        return live.EndpointRow(
            name=name,
            address=address,
            place=f"{place['spine']} {place['rack']}".replace("spine-", "s"),
            queue_s=load["pending_prefill_s"] * self.stack.options.time_scale,
            hit_ratio=node["engine"]["hit_ratio"],
            kv_usage=load["kv_usage"],
            sessions=load["sessions"],
            in_flight=load["in_flight"],
            dead=dead,
        )

    def _decision(self, row: dict[str, Any]) -> live.DecisionRow:
        return live.DecisionRow(
            clock=row["time"][11:19],
            session=row["session_id"],
            target=self._names.get(row["target"], row["target"]),
            reason=row["reason"],
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            moved_from=self._names.get(row["moved_from"], row["moved_from"]),
        )

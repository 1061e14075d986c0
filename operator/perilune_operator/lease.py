"""Leadership: at most one operator acts, chosen by a Lease (coordination.k8s.io).

The elector of `kubernetes.aio` takes and renews the Lease, and takes over a Lease that has not changed for
its duration. `Lease` is the lock that the elector works on. It adds what the elector lacks:

- A deadline. The elector learns of a lost Lease only by asking, so a process that slept (SIGSTOP, a frozen
  machine) would go on writing. `remaining_s` counts from the moment the last renewal was *sent*, by a
  monotonic clock, and reaches 0 some time before another process may take over. Each write asks it first.
      Held by tests/operator/test_lease.py::test_a_leader_that_slept_stops_before_it_asks and
      e2e/test_operators.py::test_one_that_slept_past_its_lease_does_no_harm.
- A server that cannot be reached. The elector ends with an exception; this lock reports a failed attempt.
      Held by tests/operator/test_lease.py::test_a_leader_that_cannot_reach_the_server_stops_in_time.
- Release. The elector keeps the Lease when it is cancelled, so the next operator would wait for its duration.
      Held by tests/operator/test_lease.py::test_an_operator_that_ends_releases_the_lease.

A write that was sent before the deadline can still arrive late. It is one whole object of an older plan: the
new leader sees the change and applies its own
(test_operator_writes.py::test_a_late_write_of_an_older_plan_is_overwritten). The elector measures a Lease's
age by its own wall clock. A clock that jumps forward on a follower can therefore make it take over early, at
most until the old leader's next renewal fails.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from kubernetes.aio.client import V1Lease, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from perilune_api import kube

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

NAME = "perilune-operator"
DURATION_S = 10
SHORTEST_S = 2
"""The elector asks at most once a second."""


class Lease(LeaseLock):
    """One candidate for the Lease, and the deadline until which it may write."""

    def __init__(
        self,
        client: kube.Client,
        namespace: str,
        identity: str,
        clock: Callable[[], float],
        *,
        duration_s: int = DURATION_S,
    ) -> None:
        """`clock`: monotonic seconds. `duration_s`: at least SHORTEST_S."""
        super().__init__(NAME, namespace, identity, client.api)
        self._clock = clock
        self._duration_s = duration_s
        self._margin_s = duration_s / 5
        self._retry_s = max(1.0, duration_s / 5)
        self._leads_until = float("-inf")
        self._on_leading: Callable[[], None] = lambda: None

    def remaining_s(self) -> float:
        """Return the seconds for which this process certainly leads; 0 or less when it does not."""
        return self._leads_until - self._clock()

    async def run(self, on_leading: Callable[[], None]) -> None:
        """Stand for leadership until cancelled, then release the Lease. Call `on_leading` at each win."""
        self._on_leading = on_leading
        try:
            while True:
                await self.elector().run()
                log.info("leadership lost identity=%s", self.identity)
        finally:
            await self.release()

    def elector(self) -> LeaderElection:
        """Return a new elector, which ends when it has lost the Lease."""
        return LeaderElection(
            Config(
                self,
                lease_duration=self._duration_s,
                renew_deadline=max(1.5, self._duration_s * 2 / 3),
                retry_period=self._retry_s,
                onstarted_leading=_nothing,
                onstopped_leading=_nothing,
            )
        )

    async def release(self) -> None:
        """Give up the Lease if this process leads, so that the next candidate gets it at once."""
        if self.remaining_s() <= 0:
            return
        self._leads_until = float("-inf")
        try:
            await asyncio.shield(self._in_time(self._give_back()))
        except (OSError, ApiException) as error:
            log.warning("Lease not released, it will expire error=%s", error)

    # -- what the elector calls --------------------------------------------------------------------

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception] | tuple[bool, None]:
        """Read the record. A record that names another holder ends leadership at once."""
        try:
            found = await self._in_time(super().get(name, namespace))
        except OSError as error:
            return False, ApiException(status=0, reason=str(error) or type(error).__name__)
        record = found[1]
        if isinstance(record, LeaderElectionRecord) and record.holder_identity != self.identity:
            self._leads_until = float("-inf")
        return found

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """Write the first record; return whether it was written.

        The package's own method always fails (37.0.2): it passes a boolean for `pretty`, which its API
        refuses.
        """
        first = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        return await self._claimed(self._written(self.api_instance.create_namespaced_lease(namespace, first)))

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Write the record over the one that was read; return whether it was written."""
        return await self._claimed(super().update(name, namespace, updated_record))

    # ----------------------------------------------------------------------------------------------

    async def _claimed(self, writing: Awaitable[bool]) -> bool:
        sent = self._clock()
        try:
            written = await self._in_time(writing)
        except OSError as error:
            log.warning("Lease not written error=%s", str(error) or type(error).__name__)
            return False
        if written:
            won = self.remaining_s() <= 0
            self._leads_until = sent + self._duration_s - self._margin_s
            if won:
                log.info("leadership won identity=%s", self.identity)
                self._on_leading()
        return written

    async def _written(self, creating: Awaitable[V1Lease]) -> bool:
        try:
            await creating
        except ApiException:
            return False
        return True

    async def _in_time(self, asking: Awaitable[Answer]) -> Answer:
        """Await the answer. Raises OSError when the server cannot be reached, or does not answer before the
        next attempt is due."""
        try:
            async with asyncio.timeout(2 * self._retry_s):
                return await asking
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def _give_back(self) -> None:
        lease = await self.api_instance.read_namespaced_lease(self.name, self.namespace)
        if lease.spec is not None and lease.spec.holder_identity == self.identity:
            lease.spec.holder_identity = ""
            await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)


async def _nothing() -> None:
    """Do nothing, because the lock itself reports that it is won; see `_claimed`."""

"""kopf: watches pools, posts events, and stops the operator. The only module with its decorators.

The event handler only informs the reconciler. reconcile.py explains why kopf's other handlers, which write to
the pool, are not used; observe/cluster.py explains why kopf watches no other kinds. kopf posts events only
about an object that it watches, from the tasks that its handler has started.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from perilune_api import kube, names
from perilune_api.crd import PLURAL, VERSION
from perilune_operator.observe.discovery import until_served
from perilune_operator.observe.facts import MANAGER
from perilune_operator.reconcile import Reconciler


def registry(
    client: kube.Client, reconciler: Reconciler, stop: Callable[[], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """Return all handlers, for one reconciler. `client`: asks whether pools are served. `stop` ends the
    operator's own tasks; kopf would wait 5 s for each."""
    made = kopf.OperatorRegistry()

    @kopf.on.startup(registry=made)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.event_name_prefix = f"{MANAGER}-"
        settings.posting.reporting_component = MANAGER
        settings.peering.standalone = True
        settings.queueing.exit_timeout = 0.1  # the next leader carries out the rest
        settings.queueing.idle_timeout = 1.0
        settings.watching.server_timeout = kube.WATCH_S
        settings.watching.client_timeout = kube.WATCH_S + 30
        settings.networking.connect_timeout = (
            kube.TIMEOUT_S
        )  # by default it waits for minutes in a lost network

    @kopf.on.startup(registry=made)
    async def wait_for_the_kind(**_: Any) -> None:
        try:
            await until_served(client, f"{names.GROUP}/{VERSION}", PLURAL)
        except asyncio.CancelledError:
            await stop()  # kopf calls no cleanup handler where the start was cancelled
            raise

    @kopf.on.cleanup(registry=made)
    async def clean_up(**_: Any) -> None:
        await stop()

    @kopf.on.login(registry=made)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(names.GROUP, VERSION, PLURAL, registry=made)
    async def pool_changed(
        event: kopf.RawEvent, name: str, namespace: str | None, uid: str, **_: Any
    ) -> None:
        if event["type"] == "DELETED":
            reconciler.pool_gone((namespace or "", name), uid)
        else:
            reconciler.pool_seen(dict(event["object"]))

    return made

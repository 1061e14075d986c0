"""kopf: pools. The only file with its decorators; everything it learns goes to the reconciler.

Only an index and an event handler are used, so kopf writes nothing: no finalizer (a pool can be deleted while
no operator runs; owner references do the rest), no annotations, no peering. The event handler begins once the
index holds all pools.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from perilune_api import kube, names
from perilune_api.crd import PLURAL, VERSION
from perilune_operator.reconcile import Reconciler


def registry(reconciler: Reconciler, stop: Callable[[], Awaitable[None]]) -> kopf.OperatorRegistry:
    """All handlers, bound to one reconciler. `stop` ends our tasks; kopf waits 5 s for any that it finds."""
    made = kopf.OperatorRegistry()

    @kopf.on.startup(registry=made)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.queueing.exit_timeout = 0.1  # nothing of ours is worth waiting for
        settings.queueing.idle_timeout = 1.0
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 330
        settings.networking.connect_timeout = kube.TIMEOUT_S  # or it hangs for minutes in a lost network

    @kopf.on.cleanup(registry=made)
    async def clean_up(**_: Any) -> None:
        await stop()

    @kopf.on.login(registry=made)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.index(names.GROUP, VERSION, PLURAL, registry=made, id="pools")
    def index_pool(name: str, namespace: str | None, **_: Any) -> dict[tuple[str, str], bool]:
        return {(namespace or "", name): True}

    @kopf.on.event(names.GROUP, VERSION, PLURAL, registry=made)
    async def pool_changed(
        event: kopf.RawEvent, name: str, namespace: str | None, uid: str, **_: Any
    ) -> None:
        if event["type"] == "DELETED":
            reconciler.pool_gone((namespace or "", name), uid)
        else:
            reconciler.pool(dict(event["object"]))

    return made

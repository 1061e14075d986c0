"""Finds which of the optional APIs (kinds.OPTIONAL) the cluster has, and waits for the pools' own."""

import asyncio
import logging
from collections import Counter

from perilune_api import kube
from perilune_api.foreign_bytes import UNREADABLE
from perilune_operator.kinds import OPTIONAL, full_name

log = logging.getLogger(__name__)

GONE_AFTER = 3
"""How many times in a row a kind has to be missing before it counts as gone. An API server that starts does
not serve its CRDs for a while, and the operator prunes the objects of a kind that is gone."""

WAIT_S = 1.0
"""Seconds between two questions whether pools are served."""


class Discovery:
    """Asks the API server for its optional kinds, and remembers the answer."""

    def __init__(self, client: kube.Client) -> None:
        self._client = client
        self.kinds: frozenset[str] | None = None
        """`group/Kind` of what the cluster has; None before the first answer."""
        self._missed: Counter[str] = Counter()
        """How many times in a row each known kind was missing."""

    async def ask(self) -> bool:
        """Return whether `kinds` has changed. A server that cannot answer changes nothing."""
        found: set[str] = set()
        for api, kinds in OPTIONAL.items():
            try:
                answer = await self._client.request("GET", f"/apis/{api}")
            except kube.ApiError as error:
                if error.status != 404:
                    log.warning("discovery refused api=%s error=%s", api, error)
                if error.status >= 500:
                    return False
                continue
            except OSError as error:
                log.warning("discovery failed api=%s error=%s", api, error)
                return False
            served = {resource["kind"] for resource in answer.get("resources") or ()}
            found.update(full_name(kind) for kind in kinds if kind in served)
        before = self.kinds or frozenset()
        self._missed = Counter({kind: self._missed[kind] + 1 for kind in before - found})
        found.update(kind for kind, times in self._missed.items() if times < GONE_AFTER)
        changed = self.kinds is None or found != self.kinds
        self.kinds = frozenset(found)
        return changed


async def until_served(client: kube.Client, api: str, plural: str) -> None:
    """Wait until the API server says of itself that it serves a resource. One that has just started does not
    for a moment, and none does without the CRD. kopf looks again only when a CRD changes, and would watch no
    pools until then. The log says what is missing, whenever it is something else."""
    told = ""
    while missing := await _missing(client, api, plural):
        if missing != told:
            log.warning("waiting for an API server that serves %s of %s: %s", plural, api, missing)
            told = missing
        await asyncio.sleep(WAIT_S)
    if told:
        log.info("the API server serves %s", plural)


async def _missing(client: kube.Client, api: str, plural: str) -> str:
    """Return why it cannot be said that the server serves the resource; empty if it does. One that starts may
    also refuse everything, because it does not know anybody's rights yet."""
    try:
        groups = await client.request("GET", "/apis")
        resources = await client.request("GET", f"/apis/{api}")
    except kube.ApiError as error:
        return "is the CRD installed?" if error.status == 404 else str(error)
    except (OSError, *UNREADABLE) as error:
        return str(error)
    group = api.partition("/")[0]
    listed = any(one["name"] == group for one in groups.get("groups") or ())
    served = any(one["name"] == plural for one in resources.get("resources") or ())
    return "" if listed and served else "is the CRD installed?"

"""A user of a whole stack, who also looks at its gateway's pages and edits its pool document."""

from dataclasses import dataclass
from typing import Any

import aiohttp
from msgspec import structs
from waiting import until_true

from perilune_api import pool as spec
from perilune_lab.processes.stack import Stack


@dataclass
class StackUser:
    """What users of all scenarios can do; a scenario adds its own requests."""

    stack: Stack
    http: aiohttp.ClientSession

    async def page(self, path: str) -> Any:
        """Return an admin page of the gateway."""
        async with self.http.get(self.stack.admin_url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def moves(self) -> dict[str, Any]:
        """Return the page of moves, hand-offs, remote prefills and pulls."""
        found: dict[str, Any] = await self.page("/api/moves")
        return found

    async def all_hand_over(self) -> None:
        """Wait until all engines have said that they hand KV over."""

        async def said() -> bool:
            return len((await self.moves())["connectors"]) == len(self.stack.endpoints)

        await until_true(said)

    async def metric(self, beginning: str) -> float:
        """Return the sum of the gateway's series whose lines begin so."""
        async with self.http.get(self.stack.admin_url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(beginning))

    async def fault(self, address: str, **fault: object) -> None:
        """Give an engine this fault; none ends it."""
        async with self.http.post(f"http://{address}/fault", json=fault) as answer:
            assert answer.status == 200, await answer.text()

    def drain(self, *addresses: str) -> None:
        """Mark these endpoints, and no others, as draining in the pool document."""
        pool = self.stack.pool
        endpoints = tuple(structs.replace(e, draining=e.address in addresses) for e in pool.spec.endpoints)
        changed = structs.replace(pool, spec=structs.replace(pool.spec, endpoints=endpoints))
        self.stack.pool_file.write_bytes(spec.dump(changed))

"""A pool in which one endpoint prefills for two others."""

from handing_rig import PAGES, Handing
from router_rig import USUAL, A, C, pool

from perilune_api.pool import EndpointSpec, Pool, Role


class Split(Handing):
    """A prefills, B and C decode."""

    def __init__(self) -> None:
        super().__init__(pages={**PAGES, C: "10.0.0.3:8998"})

    def pool(self, draining: str = "") -> Pool:
        listed = [
            EndpointSpec(
                address=a,
                events=(f"tcp://{a}",),
                bootstrap=page,
                role=Role.PREFILL if a == A else Role.DECODE,
            )
            for a, page in self.pages.items()
        ]
        return pool(endpoints=listed, routing=self.routing, engine=USUAL)

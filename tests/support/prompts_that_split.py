"""A pool in which one endpoint prefills for two others."""

from handing_rig import PAGES, Handing
from msgspec import structs
from router_rig import USUAL, A, C, pool

from perilune_api.pool import Disaggregation, EndpointSpec, Pool, Role


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
        away = Disaggregation(coming_requests=1)  # else an endpoint without requests prefills by itself
        routing = structs.replace(self.routing, disaggregation=away)
        return pool(endpoints=listed, routing=routing, engine=USUAL)

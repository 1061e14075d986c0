"""The list of pools of a gateway that has one pool, around a router of a test."""

from perilune_api.pool import Limits
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.waiting import Waiting
from perilune_gateway.routing.pools import Pools


def entrance(router) -> Pools:
    return Pools([router], lambda refusal: None, stopwatch=lambda: 0.0)


def service(router, tokenizer=None, *, conformance=False, limits=Limits(), **options) -> Service:  # noqa: B008
    waiting = Waiting(router, tokenizer, limits=limits, **options)
    return Service(entrance(router), [waiting], conformance=conformance)

"""An Applier of an operator that leads for good, with a clock that stands still; and the plans that it
applies."""

from collections.abc import Iterable
from typing import Any

from perilune_api.inference_pool.status import InferencePoolStatus
from perilune_operator.apply.applier import Applier
from perilune_operator.apply.ownership import Owner
from perilune_operator.apply.writer import Writer
from perilune_operator.observe.facts import Object
from perilune_operator.plan import Plan


class _Leader:
    def remaining_s(self) -> float:
        return 60.0


def applier(client: Any, owner: Owner) -> Applier:
    return Applier(Writer(client, _Leader()), owner, clock=lambda: 0.0)


def plan_of(objects: Iterable[Object]) -> Plan:
    """Return a plan of these objects and nothing else."""
    return Plan(objects=tuple(objects), status=InferencePoolStatus(), again_in=30.0)

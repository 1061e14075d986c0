"""An Applier of an operator that leads for good, with a clock that stands still."""

from collections.abc import Callable
from typing import Any

from perilune_operator.apply import Applier
from perilune_operator.writer import Writer


class _Leader:
    def remaining_s(self) -> float:
        return 60.0


def applier(client: Any, on_write: Callable[[str, str], None] = lambda method, kind: None) -> Applier:
    return Applier(client, Writer(client, _Leader(), on_write), clock=lambda: 0.0)

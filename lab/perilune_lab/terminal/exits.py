"""Exit statuses that all commands share, and how a command ends after a wrong call."""

import sys

WRONG_CALL, NOT_WRITTEN, INTERRUPTED, PIPE_CLOSED = 2, 74, 130, 141


def wrong_call(command: str, error: Exception | str) -> int:
    """Print what is wrong with a call or its document to stderr. Return the exit status."""
    print(f"{command}: {error}", file=sys.stderr)
    return WRONG_CALL

"""Exit statuses that all commands share, and the end of a wrong call."""

import sys

WRONG_CALL, NOT_WRITTEN, INTERRUPTED, PIPE_CLOSED = 2, 74, 130, 141


def wrong_call(command: str, error: Exception | str) -> int:
    """Says what is wrong with a call or its document; the exit status."""
    print(f"{command}: {error}", file=sys.stderr)
    return WRONG_CALL

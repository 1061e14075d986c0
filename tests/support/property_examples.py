"""With how many examples a property is tried: a sixth of them every day, all with EXAMPLES=all."""

import os


def examples(number: int) -> int:
    """Return how many of `number` examples to try. `make test-heavy` tries all."""
    return number if os.environ.get("EXAMPLES") == "all" else -(-number // 6)

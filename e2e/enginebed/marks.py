"""Marks of the scenarios with genuine engines."""

import os

import pytest

REQUESTS = int(os.environ.get("REQUESTS", "100"))
"""How many requests the longest phases have."""
SHORT = REQUESTS < 70
"""Whether to send fewer requests than usual where more of them would show the same (`make verify`)."""
TAKES_MINUTES = pytest.mark.skipif(REQUESTS < 200, reason="takes minutes: make e2e-real-long")

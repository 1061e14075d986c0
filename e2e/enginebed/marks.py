"""Marks of the scenarios with genuine engines."""

import os

import pytest

REQUESTS = int(os.environ.get("REQUESTS", "100"))
"""How many requests the longest phases have."""
TAKES_MINUTES = pytest.mark.skipif(REQUESTS < 200, reason="takes minutes: make e2e-real-long")

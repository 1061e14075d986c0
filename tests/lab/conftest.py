from collections.abc import AsyncIterator

import pytest

from perilune_lab.testing import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server

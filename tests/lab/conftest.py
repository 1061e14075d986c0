from collections.abc import AsyncIterator

import pytest
from openai_server import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server

"""A user whose prompts share long beginnings, in front of a whole stack."""

from dataclasses import dataclass, field
from typing import Any

from stack_user import StackUser
from waiting import until_true

from perilune_lab.vocabulary import Vocabulary

BLOCK, LONG = 16, 6_400
"""Tokens of a KV block, and of a prompt's beginning."""
WORDS = Vocabulary()


@dataclass
class User(StackUser):
    url: str
    failed: list[str] = field(default_factory=list)

    async def ask(self, prompt: int, end: int = 0, **more: object) -> tuple[str, int]:
        """Send a request whose prompt has a long beginning, and another end for each `end`. Return the
        endpoint that served it, and the tokens that it did not have to compute."""
        ids = WORDS.ids_for(prompt, LONG) + (WORDS.ids_for(100_000 + end, 100) if end else [])
        body = {"model": self.stack.options.model, "prompt": ids, "max_tokens": 4, **more}
        async with self.http.post(self.url + "/v1/completions", json=body) as answer:
            if answer.status != 200:
                self.failed.append(f"{prompt}: {answer.status} {await answer.text()}")
                return "", 0
            usage = (await answer.json())["usage"]
            return answer.headers["x-perilune-endpoint"], usage["prompt_tokens_details"]["cached_tokens"]

    async def outcomes(self) -> list[tuple[str, str | None]]:
        """Return how pulls ended, once the gateway has heard of the end of every request, which is after the
        client. That a pull is over is not enough: its outcome is told when its request has ended."""

        async def all_have_ended() -> bool:
            return await self.metric("perilune_endpoint_in_flight_requests{") == 0

        await until_true(all_have_ended)
        pulls = (await self.moves())["pulls"]
        assert pulls["open"] == 0
        return [(one["outcome"], one["cause"]) for one in pulls["ended"]]

    def child(self, address: str) -> Any:
        return self.stack.children[f"engine-{self.stack.endpoints.index(address)}"]

"""One request on the simulated server."""

from collections.abc import Sequence
from enum import StrEnum
from math import inf

from perilune_lab.engine.kv_cache import Table


class Finish(StrEnum):
    """Why a request ended; the values are vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Request:
    """A request and its progress. Times are engine seconds; inf for what has not happened yet."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "computed",
        "finish",
        "finished_s",
        "first_token_s",
        "last_token_s",
        "natural_end",
        "ordinal",
        "output",
        "preemptions",
        "priority",
        "produced",
        "prompt_tokens",
        "ready_s",
        "report_full",
        "request_id",
        "scheduled_s",
        "shared_blocks",
        "store_tokens",
        "table",
    )

    def __init__(
        self,
        request_id: str,
        table: Table,
        output: Sequence[int],
        *,
        natural_end: bool = False,
        priority: int = 0,
        report_full: bool = False,
    ) -> None:
        """`output`: the tokens that this request will produce, at least one; `natural_end`: it ends because
        the model stops, not because of its limit."""
        if not output:
            raise ValueError("a request produces at least one token")
        self.request_id = request_id
        self.table = table
        self.output = output
        self.natural_end = natural_end
        self.priority = priority
        self.report_full = report_full
        self.prompt_tokens = len(table.tokens)
        self.ordinal = -1
        """Order of admission; -1: not admitted yet."""
        self.computed = 0
        """Leading tokens whose KV exists, or will when the current step ends."""
        self.produced = 0
        self.cached_tokens = 0
        """Prompt tokens found in a cache at first admission, store included."""
        self.store_tokens = 0
        """Cached prompt tokens that came from the shared store."""
        self.preemptions = 0
        self.shared_blocks = 0
        """Leading blocks that were offered to the store."""
        self.arrived_s = self.scheduled_s = inf
        self.ready_s = inf
        """When it can run: arrival + request overhead, or the end of its load from the store."""
        self.first_token_s = self.last_token_s = self.finished_s = inf
        self.finish: Finish | None = None

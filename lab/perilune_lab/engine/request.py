"""One request on the simulated server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from perilune_lab.engine.kv_cache import Table


class Finish(StrEnum):
    """Why a request ended; the values are vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Give:
    """A request whose KV another engine will fetch."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Take:
    """A request whose KV comes from the engine with this id."""

    transfer_id: str
    bootstrap: str
    """URL of the giver's bootstrap page, without its path."""
    engine_id: str


@dataclass(frozen=True, slots=True)
class Source:
    """A request for which another engine's host memory is read, see `peers`."""

    kv_request_id: str
    host: str
    port: int


Leg = Give | Take | Source


def leg_of(params: Mapping[str, Any] | None) -> Leg | None:
    """Return the leg that `kv_transfer_params` ask for; None for an ordinary request."""
    known = {name: value for name, value in (params or {}).items() if value}
    match known:
        case {
            "do_remote_prefill": True,
            "transfer_id": str(transfer_id),
            "remote_bootstrap_addr": str(bootstrap),
            "remote_engine_id": str(engine_id),
        }:
            return Take(transfer_id, bootstrap, engine_id)
        case {
            "remote_kv_source": {
                "kv_request_id": str(kv_request_id),
                "remote_host": str(host),
                "remote_port": int(port),
            }
        } if kv_request_id and host and port:
            return Source(kv_request_id, host, port)
        case {"do_remote_decode": True, "transfer_id": str(transfer_id)}:
            return Give(transfer_id)
    return None


class Request:
    """A request and its progress. Times are engine seconds; inf for what has not happened yet."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "finish",
        "finished_s",
        "first_token_s",
        "host_tokens",
        "last_token_s",
        "leg",
        "loaded_tokens",
        "natural_end",
        "ordinal",
        "output",
        "preemptions",
        "priority",
        "produced",
        "prompt_tokens",
        "pulled_tokens",
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
        leg: Leg | None = None,
    ) -> None:
        """`output`: the tokens that this request will produce, at least one; `natural_end`: it ends because
        the model stops, not because of its limit; `leg`: its part in a hand-off, see `connector`."""
        if not output:
            raise ValueError("a request produces at least one token")
        self.request_id = request_id
        self.table = table
        self.output = output
        self.natural_end = natural_end
        self.priority = priority
        self.report_full = report_full
        self.leg = leg
        self.prompt_tokens = len(table.tokens)
        self.ordinal = -1
        """Order of admission; -1 if it is not admitted yet."""
        self.produced = 0
        self.cached_tokens = 0
        """Prompt tokens found in a cache at first admission, store included."""
        self.store_tokens = 0
        """Cached prompt tokens that came from the shared store."""
        self.host_tokens = 0
        """Cached prompt tokens that came from host memory, the engine's own or another's."""
        self.loaded_tokens = 0
        """Leading tokens whose KV is there when its load ends."""
        self.pulled_tokens = 0
        """Cached prompt tokens that came from another engine, also those that went through host memory."""
        self.preemptions = 0
        self.shared_blocks = 0
        """Leading blocks that were offered to the store."""
        self.arrived_s = self.scheduled_s = inf
        self.ready_s = inf
        """When it can run: arrival + request overhead, or the end of its load from the store."""
        self.first_token_s = self.last_token_s = self.finished_s = inf
        self.finish: Finish | None = None

    @property
    def computed(self) -> int:
        """Leading tokens whose KV exists, or will when the current step ends."""
        return self.table.computed

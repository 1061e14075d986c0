"""Checks that our block hashes equal those that engines announce, and finds the cause if they differ.

Routing works without equal hashes, because `state.engine_blocks` translates them. But a difference shows that
gateway and engine disagree about prompts: about block size, adapter, salt, seed, algorithm or chat template.
The shared store, and engines that share a pool, depend on all of these.

1. `observe` recomputes vLLM's hashes from an event's own tokens and compares them, for the first `first`
   stores of an endpoint and then for one in `one_in`. A chain can be followed only from its root or from a
   block whose full digest was recomputed before; the newest `max_digests` digests are kept.
2. If they differ, it repeats the computation with other extra keys, seeds and algorithms, in this order and
   with one change before two. The first settings that agree are the probable cause.
3. `request_blocks_seen` compares a routed prompt with the engine's events. If hashes agree but the prompt's
   blocks never appear, the gateway tokenized the prompt differently, so the chat template differs. Misses are
   ignored while events arrive late (`heard`), and where the prompt's blocks may wait for a parent (`waits`).
4. `report` returns an endpoint's state from its last results; `news` returns it only when it has changed.

Costs about 3 µs per compared block. The search for a cause looks at one block and runs only on a difference.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from math import inf

from perilune_api.pool import ExtraKeys, HashAlgorithm, Hashing, SpecError
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import has_full_attention, mm_of, salt_of
from perilune_gateway.state.facts import EndpointLeft

_RECENT = 32
"""Number of last results that a report uses."""
_ENOUGH_REQUESTS, _FEW_SEEN = 8, 0.25
"""The template differs if, of at least this many prompts, less than this share appeared in events."""
LATE_S = 1.0
"""Lag in seconds above which events are late. `request_blocks_seen` is called this long after a request."""


class Parity(StrEnum):
    """How an endpoint's announced block hashes relate to ours."""

    UNKNOWN = "unknown"
    """No event could be compared yet."""
    OK = "ok"
    SEED = "seed"
    ALGORITHM = "algorithm"
    BLOCK_SIZE = "block_size"
    EXTRA_KEYS = "extra_keys"
    TEMPLATE = "template"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Report:
    """One endpoint's state."""

    parity: Parity = Parity.UNKNOWN
    cause: str = ""
    """What differs, in words; empty if nothing does."""
    cure: str = ""
    """What the user can do about it; empty if nothing differs."""


@dataclass(slots=True, kw_only=True)
class _Endpoint:
    seen: int = 0
    """Number of stores, compared or not."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Low 64 bits → full digest of blocks from which a chain can be followed."""
    recent: deque[tuple[Parity, str]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Results of the last comparisons, with the cause."""
    recent_requests: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Whether the blocks of the last prompts appeared in events."""
    late: bool = True
    """Whether the last batch of events was late, or none has arrived yet."""
    waited_at: float = -inf
    """When a batch last brought blocks whose parents are unknown."""
    reported: Parity = Parity.UNKNOWN
    """Parity that `news` returned last."""


class ParityCheck:
    """The self-check of one pool."""

    def __init__(
        self,
        hashing: Hashing,
        block_size: int,
        *,
        lora_paths: Mapping[str, str] | None = None,
        first: int = 64,
        one_in: int = 50,
        max_digests: int = 4096,
    ) -> None:
        """`lora_paths` maps an adapter's name to its path, which vLLM's hashes include."""
        self._hashing = hashing
        self._block_size = block_size
        self._lora_paths = lora_paths or {}
        self._first = first
        self._one_in = one_in
        self._max_digests = max_digests
        self._endpoints: dict[str, _Endpoint] = {}

    def observe(self, endpoint: str, event: BlockStored) -> Parity | None:
        """Compare one event if it is sampled and can be compared. Returns None if it was not compared."""
        if (event.medium or "GPU").upper() != "GPU" or not has_full_attention(event):
            return None
        state = self._of(endpoint)
        state.seen += 1
        if state.seen > self._first and state.seen % self._one_in:
            return None
        if not event.block_hashes or not event.token_ids:
            return None
        result = self._compare(state, event)
        if result is not None:
            state.recent.append(result)
            return result[0]
        return None

    def heard(self, endpoint: str, lag_s: float) -> None:
        """Record that a batch of events arrived `lag_s` seconds after publication; NaN for a replayed one."""
        self._of(endpoint).late = not lag_s <= LATE_S

    def waits(self, endpoint: str, now: float) -> None:
        """Record that a batch brought blocks that are not used yet, because their parents are unknown."""
        self._of(endpoint).waited_at = now

    def request_blocks_seen(self, endpoint: str, seen: bool, since: float) -> None:
        """Record whether the last full block of a prompt, routed at `since`, appeared in the events.
        Call it only for prompts that the gateway tokenized and that had a full block that was not cached
        before."""
        state = self._endpoints.get(endpoint)
        if state is None or (not seen and (state.late or state.waited_at >= since)):
            return
        state.recent_requests.append(seen)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.forget(fact.address)

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint that is gone or was restarted."""
        self._endpoints.pop(endpoint, None)

    def news(self, endpoint: str) -> Report | None:
        """Return the endpoint's report if its parity has changed since the last call, else None."""
        state, found = self._endpoints.get(endpoint), self.report(endpoint)
        if state is None or found.parity is state.reported:
            return None
        state.reported = found.parity
        return found

    def report(self, endpoint: str) -> Report:
        """Return the most frequent difference of the last results; OK if there is none."""
        state = self._endpoints.get(endpoint)
        if state is None:
            return Report()
        wrong = Counter(result for result in state.recent if result[0] is not Parity.OK)
        requests = state.recent_requests
        parity, cause = (Parity.OK if state.recent else Parity.UNKNOWN), ""
        if wrong:
            (parity, cause), _ = wrong.most_common(1)[0]
        elif len(requests) >= _ENOUGH_REQUESTS and sum(requests) < _FEW_SEEN * len(requests):
            parity = Parity.TEMPLATE
            cause = (
                f"{len(requests) - sum(requests)} of its last {len(requests)} prompts never showed up"
                " among its blocks, although hashes agree: they were tokenized differently here"
            )
        return Report(parity, cause, CURES[parity])

    # ----------------------------------------------------------------------------------------------

    def _of(self, endpoint: str) -> _Endpoint:
        state = self._endpoints.get(endpoint)
        if state is None:
            state = self._endpoints[endpoint] = _Endpoint()
        return state

    def _compare(self, state: _Endpoint, event: BlockStored) -> tuple[Parity, str] | None:
        announced = event.block_size or len(event.token_ids) // len(event.block_hashes)
        if len(event.token_ids) != announced * len(event.block_hashes):
            return None  # which tokens are whose, only the engine knows
        if not announced or announced % self._block_size:
            return Parity.BLOCK_SIZE, f"its blocks hold {announced} tokens, the pool says {self._block_size}"
        parent: bytes | None = None
        if event.parent_block_hash is not None:
            parent = (
                event.parent_block_hash
                if isinstance(event.parent_block_hash, bytes) and len(event.parent_block_hash) > 8
                else state.digests.get(_low(event.parent_block_hash))
            )
            if parent is None:
                return None
        ours = self._hash(event, self._hashing, parent)
        if ours is not None and all(map(_equal, event.block_hashes, ours)):
            state.digests.update((blocks.low64(digest), digest) for digest in ours)
            for oldest in list(islice(state.digests, max(0, len(state.digests) - self._max_digests))):
                del state.digests[oldest]
            return Parity.OK, ""
        if announced != self._block_size:  # vLLM makes some of them from the hashes of smaller blocks
            return None
        return self._explain(event, parent)

    def _explain(self, event: BlockStored, parent: bytes | None) -> tuple[Parity, str]:
        pool = self._hashing
        if parent is None and _is_of_sglang(event):
            return Parity.OK, ""
        for hashing in _alternatives(pool, event.parent_block_hash is None):
            ours = self._hash(event, hashing, parent, blocks_wanted=1)
            if ours and _equal(event.block_hashes[0], ours[0]):
                differences = [
                    f"{name} {theirs!r}, the pool says {own!r}"
                    for name, theirs, own in (
                        ("hash algorithm", str(hashing.algorithm), str(pool.algorithm)),
                        ("PYTHONHASHSEED", hashing.seed or "unset", pool.seed or "unset"),
                        ("extra keys", str(hashing.extra_keys), str(pool.extra_keys)),
                    )
                    if theirs != own
                ]
                parity = (
                    Parity.ALGORITHM
                    if hashing.algorithm is not pool.algorithm
                    else Parity.SEED
                    if hashing.seed != pool.seed
                    else Parity.EXTRA_KEYS
                )
                return parity, "the engine uses " + "; ".join(differences)
        if event.lora_name or any(event.extra_keys or ()):
            what = f"adapter {event.lora_name!r}" if event.lora_name else "cache salt or multimodal keys"
            return Parity.EXTRA_KEYS, f"prompts with {what} hash differently there"
        if event.parent_block_hash is None:
            if self._continues(event):
                return Parity.SEED, "only its chains' root differs: another PYTHONHASHSEED, or a random root"
            return (
                Parity.UNEXPLAINED,
                "no known algorithm or seed gives its hashes; most likely PYTHONHASHSEED is unset there and"
                " its root is random (vLLM before 0.29, or an xxhash algorithm)",
            )
        return Parity.UNEXPLAINED, "no known algorithm gives its hashes"

    def _continues(self, event: BlockStored) -> bool:
        """Return whether the second block's hash follows from the first. Needs full digests."""
        if len(event.block_hashes) < 2 or not isinstance(event.block_hashes[0], bytes):
            return False
        tokens = event.token_ids[self._block_size : 2 * self._block_size]
        second = list(
            blocks.vllm_chain(tokens, self._block_size, self._hashing, parent=event.block_hashes[0])
        )
        return _equal(event.block_hashes[1], second[0])

    def _hash(
        self, event: BlockStored, hashing: Hashing, parent: bytes | None, blocks_wanted: int | None = None
    ) -> list[bytes] | None:
        """Return vLLM's hashes of the event's tokens, or None if they cannot be computed."""
        size = event.block_size or self._block_size
        tokens = event.token_ids if blocks_wanted is None else event.token_ids[: blocks_wanted * size]
        lora = event.lora_name or ""
        try:
            return list(
                blocks.vllm_chain(
                    tokens,
                    size,
                    hashing,
                    lora,
                    self._lora_paths.get(lora, ""),
                    salt_of(event),
                    mm_of(event),
                    parent,
                )
            )
        except (SpecError, ValueError, TypeError):
            return None


CURES: Mapping[Parity, str] = {
    Parity.UNKNOWN: "",
    Parity.OK: "",
    Parity.SEED: "start all engines with the same PYTHONHASHSEED and set `spec.engine.hashing.seed` to it",
    Parity.ALGORITHM: "set `spec.engine.hashing.algorithm` to the engines' --prefix-caching-hash-algo",
    Parity.BLOCK_SIZE: "set `spec.engine.blockSize` to the engines' --block-size",
    Parity.EXTRA_KEYS: "set `spec.engine.hashing.extraKeys` (tagged since vLLM 0.31, bare before), and each"
    " adapter's `path` in `spec.model.loras`",
    Parity.TEMPLATE: "give `spec.model.tokenizer` the engines' tokenizer and chat template, or let the engine"
    " tokenize (`spec.model.tokenize: engine`)",
    Parity.UNEXPLAINED: "start all engines with one PYTHONHASHSEED, set `spec.engine.hashing.seed` to it, and"
    " compare `spec.engine.hashing` with the engines' flags",
}


def _is_of_sglang(event: BlockStored) -> bool:
    """Return whether a prompt's first block has SGLang's hash, which no store and no other engine shares: the
    SHA-256 of its tokens as 32-bit words."""
    try:
        words = array("I", event.token_ids[: event.block_size])
    except (OverflowError, TypeError):
        return False
    if sys.byteorder == "big":
        words.byteswap()
    announced = _low(event.block_hashes[0]) & (1 << 64) - 1  # theirs is signed
    return announced == int.from_bytes(hashlib.sha256(words).digest()[:8], "big")


def _alternatives(pool: Hashing, at_root: bool) -> Iterator[Hashing]:
    """Yield other settings, those with the fewest changes first. The seed only affects the first block."""
    seeds = [pool.seed, *({"", "0"} - {pool.seed})] if at_root else [pool.seed]
    every = [
        Hashing(algorithm, seed, keys) for algorithm in HashAlgorithm for seed in seeds for keys in ExtraKeys
    ]

    def changes(other: Hashing) -> tuple[int, bool, bool]:
        algorithm, seed = other.algorithm is not pool.algorithm, other.seed != pool.seed
        return algorithm + seed + (other.extra_keys is not pool.extra_keys), algorithm, seed

    return (other for other in sorted(every, key=changes) if other != pool)


def _low(name: int | bytes) -> int:
    return name if isinstance(name, int) else blocks.low64(name)


def _equal(name: int | bytes, digest: bytes) -> bool:
    return name == digest if isinstance(name, bytes) and len(name) > 8 else _low(name) == blocks.low64(digest)

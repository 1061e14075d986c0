"""Do our block hashes equal what engines announce? If not, why, and what cures it.

Routing does not need the answer (events are mapped, `state.engine_blocks`), but a disagreement says that
gateway and engine see different prompts: another block size, adapter, salt, seed or algorithm, or another
chat template. Store keys and engines that share a pool depend on all of them.

1. `observe` recomputes vLLM's hashes from an event's own tokens and compares: the first `first` stores of an
   endpoint, then one in `one_in`. A chain can be followed only from a block whose full digest is known: its
   root, or a block that was recomputed before (the newest `max_digests` are kept).
2. Where they differ, the likely cause is what makes them agree: the same computation with other extra keys,
   seeds, algorithms, in this order, one change before two.
3. `request_blocks_seen` is the router's side: hashes may agree while a prompt's own blocks never show up in
   the engine's stores. Then the prompt was tokenized differently here: the template. Where events come late
   (`heard`: a gateway that has just started, an engine that has too much to do) it says nothing.
4. `report` gives an endpoint's state from its last results, with a sentence for people; `news` only where it
   has changed.

Costs: about 3 µs per compared block, nothing for a store that is not sampled; the search for a cause is done
only on a disagreement, and for at most one block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from perilune_api.pool import ExtraKeys, HashAlgorithm, Hashing, SpecError
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import mm_of, salt_of

_RECENT = 32
"""Results that a report is about."""
_ENOUGH_REQUESTS, _FEW_SEEN = 8, 0.25
"""Of so many prompts at least, less than this share showed up: the template differs."""
LATE_S = 1.0
"""Events that lag more may be missing when `request_blocks_seen` is asked, which is so long after an end."""


class Parity(StrEnum):
    """How an endpoint's announced block hashes relate to ours."""

    UNKNOWN = "unknown"
    """Nothing could be compared yet."""
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
    """Where they differ, in a sentence."""
    cure: str = ""


@dataclass(slots=True)
class _Endpoint:
    seen: int = 0
    """Stores, compared or not."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Whole ones, by their low 64 bits: chains go on from there."""
    recent: deque[tuple[Parity, str]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """How the last comparisons ended, with the cause."""
    recent_requests: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Whether the last prompts' blocks showed up."""
    late: bool = True
    """Its last batch was, or none has come yet."""
    told: Parity = Parity.UNKNOWN
    """As `news` said last."""


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
        """`lora_paths`: adapter name → path, which is part of vLLM's hash."""
        self._hashing = hashing
        self._block_size = block_size
        self._lora_paths = lora_paths or {}
        self._first = first
        self._one_in = one_in
        self._max_digests = max_digests
        self._endpoints: dict[str, _Endpoint] = {}

    def observe(self, endpoint: str, event: BlockStored) -> Parity | None:
        """Compare one event, if it is due and can be; None: it was not compared."""
        if (event.medium or "GPU").upper() != "GPU" or event.group_idx:
            return None
        state = self._endpoints.setdefault(endpoint, _Endpoint())
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
        """A batch of events came, so long after it was published; NaN: out of a replay."""
        state = self._endpoints.get(endpoint)
        if state is None:
            state = self._endpoints[endpoint] = _Endpoint()
        state.late = not lag_s <= LATE_S

    def request_blocks_seen(self, endpoint: str, seen: bool) -> None:
        """A prompt that was routed there has ended: did its last full block show up in the engine's stores?
        Only for prompts tokenized here, with at least one full block that was not cached before."""
        state = self._endpoints.get(endpoint)
        if state is None or (state.late and not seen):
            return
        state.recent_requests.append(seen)

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone, or a new process answers under its address."""
        self._endpoints.pop(endpoint, None)

    def news(self, endpoint: str) -> Report | None:
        """Its report, if its parity is another than the last time that it was asked for here."""
        state, found = self._endpoints.get(endpoint), self.report(endpoint)
        if state is None or found.parity is state.told:
            return None
        state.told = found.parity
        return found

    def report(self, endpoint: str) -> Report:
        """The most frequent disagreement of the last results; OK if there is none."""
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

    def _compare(self, state: _Endpoint, event: BlockStored) -> tuple[Parity, str] | None:
        announced = event.block_size or len(event.token_ids) // len(event.block_hashes)
        if announced != self._block_size:
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
        return self._explain(event, parent)

    def _explain(self, event: BlockStored, parent: bytes | None) -> tuple[Parity, str]:
        pool = self._hashing
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
        """Does its second block follow from its first? Only to be seen where whole digests are announced."""
        if len(event.block_hashes) < 2 or not isinstance(event.block_hashes[0], bytes):
            return False
        tokens = event.token_ids[self._block_size : 2 * self._block_size]
        second = blocks.vllm_hashes(tokens, self._block_size, self._hashing, parent=event.block_hashes[0])
        return _equal(event.block_hashes[1], second[0])

    def _hash(
        self, event: BlockStored, hashing: Hashing, parent: bytes | None, blocks_wanted: int | None = None
    ) -> list[bytes] | None:
        """None: nobody can compute it."""
        tokens = (
            event.token_ids if blocks_wanted is None else event.token_ids[: blocks_wanted * self._block_size]
        )
        lora = event.lora_name or ""
        try:
            return blocks.vllm_hashes(
                tokens,
                self._block_size,
                hashing,
                lora,
                self._lora_paths.get(lora, ""),
                salt_of(event),
                mm_of(event),
                parent,
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


def _alternatives(pool: Hashing, at_root: bool) -> Iterator[Hashing]:
    """Other settings, those with fewest changes first; a seed only matters to a chain's first block."""
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

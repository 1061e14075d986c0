"""What engines that the operator does not run lack for exact routing: what that costs, and the flag that
cures it.

The gateway finds them (`perilune_gateway.observe.findings`), `perilune doctor` prints them, and the operator
puts them into the condition RoutingExact. One word is JSON, metric label and test.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

EVENTS_PORT, REPLAY_PORT = 5557, 5558
"""The ports that vLLM's and other routers' documents use for KV events and their replay."""
REPLAY_FIELD = f'"replay_endpoint":"tcp://*:{REPLAY_PORT}"'
EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    f'"endpoint":"tcp://*:{EVENTS_PORT}",{REPLAY_FIELD}}}\''
)


class Finding(StrEnum):
    """What an engine lacks, worst first."""

    UNREACHABLE = "unreachable"
    """It does not answer /v1/models."""
    OTHER_MODEL = "other_model"
    """It serves another model than the pool."""
    ASLEEP = "asleep"
    """It sleeps."""
    NO_PREFIX_CACHING = "no_prefix_caching"
    """It reuses no KV."""
    BLOCK_SIZE = "block_size"
    """Its KV blocks have another size than the pool's."""
    NO_EVENTS = "no_events"
    """It publishes no KV events."""
    EVENTS_SILENT = "events_silent"
    """Nothing can be connected to where its KV events should come from, or none has come although it serves
    prompts."""
    HASHING = "hashing"
    """It hashes blocks otherwise than the pool says."""
    TOKENS = "tokens"
    """It makes other tokens of a prompt than the other engines, or than the pool's tokenizer."""
    NO_TOKENIZE = "no_tokenize"
    """It does not answer /tokenize, and the pool has no tokenizer of its own."""
    NO_METRICS = "no_metrics"
    """Its /metrics has nothing of vLLM."""
    NO_REPLAY = "no_replay"
    """Missed KV events are not replayed."""
    RANDOM_SEED = "random_seed"
    """It hashes blocks with a seed that is new after each start."""
    NO_TRANSFER = "no_transfer"
    """It hands no KV over to other engines."""


class Advice(NamedTuple):
    costs: str
    """What it costs in routing."""
    cure: str
    """What to change, with the exact flag where there is one."""
    exact: bool = False
    """Whether routing is exact nevertheless."""
    listed: str = ""
    """What to change where a pool document lists the engine, if that is something else."""


ADVICE: Mapping[Finding, Advice] = {
    Finding.UNREACHABLE: Advice(
        "requests that are sent there fail, and its share of the pool is missing",
        "see its log; if it demands a key, name the key's Secret in engine.apiKey (for a pool from a file,"
        " and for perilune doctor, set PERILUNE_ENGINE_API_KEY)",
    ),
    Finding.OTHER_MODEL: Advice(
        "it answers none of the pool's requests, and where pods are selected it gets none",
        "leave it to another pool: select labels, or list endpoints, that only engines of this model have",
    ),
    Finding.ASLEEP: Advice("it gets no requests, and has no KV", "POST /wake_up to it"),
    Finding.NO_PREFIX_CACHING: Advice(
        "it computes every prompt as a whole, whatever it has seen before",
        "start it with --enable-prefix-caching",
    ),
    Finding.BLOCK_SIZE: Advice(
        "no prefix is found there", "start all engines of the pool with the same --block-size"
    ),
    Finding.NO_EVENTS: Advice(
        "what it caches is estimated from the requests that the gateway has sent there: evictions, and the"
        " prompts of other clients, are not seen",
        f"start it with {EVENTS_FLAG}",
        listed=f"start it with {EVENTS_FLAG}, and give its endpoint in the pool document these addresses as"
        " `events` and `replay`",
    ),
    Finding.EVENTS_SILENT: Advice(
        "what it caches is estimated from the requests that the gateway has sent there",
        "publish at an address that listens, tcp://*:PORT, with enable_kv_cache_events, and let the gateway"
        " reach that port",
    ),
    Finding.HASHING: Advice(
        "what it has in a shared store is not found, and hashes cannot be compared",
        "start all engines with the same --prefix-caching-hash-algo",
        exact=True,
    ),
    Finding.TOKENS: Advice(
        "prompts are looked up by other tokens than it has, so its cache is found in part or not at all",
        "start all engines with the same model files and --chat-template",
    ),
    Finding.NO_TOKENIZE: Advice(
        "prompts are looked up by an estimate of their tokens",
        "mount the model's tokenizer into the gateway (model.tokenizer), or let vLLM's /tokenize be reached",
    ),
    Finding.NO_METRICS: Advice(
        "its load is counted from the gateway's own requests, without those of other clients",
        "start it without --disable-log-stats, or SGLang with --enable-metrics",
    ),
    Finding.NO_REPLAY: Advice(
        "after events were missed, what it caches is forgotten and learned again",
        f"add {REPLAY_FIELD} to its --kv-events-config",
        exact=True,
        listed=f"add {REPLAY_FIELD} to its --kv-events-config, and give its endpoint in the pool document"
        " this address as `replay`",
    ),
    Finding.RANDOM_SEED: Advice(
        "hashes differ between engines and after each start: nothing of a shared store is found",
        "set PYTHONHASHSEED=0 on all engines, and engine.hashing.seed to the same (vLLM 0.29 and newer need"
        " neither)",
        exact=True,
    ),
    Finding.NO_TRANSFER: Advice(
        "a session that moves computes its context again",
        "hand-off and store need engines that the operator runs: mooncake.transfer in a pool of its own",
        exact=True,
        listed="start it with vLLM's MooncakeConnector (kv_role kv_both), and give its endpoint in the pool"
        " document the address of the connector's page as `bootstrap`",
    ),
}

"""The program in an engine's container, vLLM or the simulated engine: its command, arguments and environment.

Users may not set what is set here; `perilune_api.inference_pool.arguments` refuses it. `serve` is true for a
pod that serves HTTP, and false for a worker, which is a further pod of an endpoint that spans nodes.
"""

import json
from math import ceil

from perilune_api import names
from perilune_api.inference_pool.engine import EngineKind
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Object
from perilune_operator.render import api_key, door, engine_tls, model_cache, mooncake
from perilune_operator.render.endpoints import nodes_per_endpoint, ranks, ranks_per_pod
from perilune_operator.render.kv_name import kv_name
from perilune_operator.render.objects import Context

EVENTS_PORT = 5557
"""Port of rank 0's KV events; each further data-parallel rank has the next one, as vLLM counts."""
REPLAYED_STEPS = 50_000
"""Batches of KV events that an engine keeps for gateways that start later; vLLM's default is 10,000."""
PEER_PORT = 5710
"""Port at which other engines read rank 0's host memory, as vLLM's default; each further rank has the next
one."""
BOOTSTRAP_PORT = 8998
"""Port of the bootstrap page of an engine that hands KV over; also vLLM's default."""
MEETING_PORT = 29_501
"""Port at which the leader of an endpoint that spans nodes awaits its workers (torch.distributed; vLLM's own
handshake where they run data-parallel ranks)."""
LEADER_ANSWERS = f"""\
import os, socket
socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], {MEETING_PORT}), 2)
"""


def replay_port(pool: Context) -> int:
    """Return the port of rank 0's replay, which follows the ports of all ranks' events."""
    return EVENTS_PORT + ranks(pool)


def peers(pool: Context) -> bool:
    """Return whether engines read each other's host memory. vLLM's tier for that (0.32) is of one node, and
    listens at IPv4 addresses only. Which endpoint reads which one, the pool's own gateway says: engines obey
    no other."""
    offloads = pool.spec.mooncake.transfer is Transfer.OFFLOAD
    own = not pool.spec.gateway.served_by and not pool.defaults.ipv6
    return offloads and own and nodes_per_endpoint(pool) == 1


def command(pool: Context, serve: bool) -> list[str]:
    """Return the container's command; the program's arguments follow."""
    if pool.spec.engine.kind is EngineKind.SIMULATED:
        return ["perilune", "engine"]
    if serve:
        return ["vllm", "serve"]
    # A worker that ends makes the LeaderWorkerSet recreate the whole group, so it waits for its leader.
    join = 'until python3 -c "$0" 2>/dev/null; do sleep 1; done; exec vllm serve "$@"'
    if ranks(pool) > 1:
        join += f" --data-parallel-start-rank=$((LWS_WORKER_INDEX * {ranks_per_pod(pool)}))"
    return ["/bin/sh", "-c", join, LEADER_ANSWERS]


def env(pool: Context, serve: bool) -> list[Object]:
    """Return the operator's environment variables, overridden by the user's."""
    engine = pool.spec.engine

    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    made = [
        field("POD_IP", "status.podIP"),
        field("POD_NAME", "metadata.name"),
        {"name": "HOME", "value": "/home/perilune"},
        {"name": "USER", "value": "perilune"},  # torch asks for a user name, which the uid does not have
    ]
    if engine.kind is EngineKind.VLLM:
        made.append({"name": "VLLM_HOST_IP", "value": "$(POD_IP)"})
        made.append({"name": "VLLM_NO_USAGE_STATS", "value": "1"})
        if engine.hashing.seed:
            made.append({"name": "PYTHONHASHSEED", "value": engine.hashing.seed})
        made.extend(model_cache.env(pool))
        if pool.spec.mooncake.store.enabled:
            made.extend(mooncake.env(pool))
        if pool.spec.mooncake.transfer is Transfer.HANDOFF:
            made.append({"name": "VLLM_MOONCAKE_BOOTSTRAP_PORT", "value": str(BOOTSTRAP_PORT)})
            abort_s = str(abort_seconds(pool))
            made.append({"name": "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "value": abort_s})
        if sleeps(pool):
            made.append({"name": "VLLM_SERVER_DEV_MODE", "value": "1"})  # it serves /sleep only then
        made.extend(door.env(pool))
        made.extend(engine_tls.env(pool) if serve else ())
        if not serve:  # newer LeaderWorkerSets set it themselves
            made.append(field("LWS_WORKER_INDEX", f"metadata.labels['{names.WORKER_INDEX}']"))
    made.extend(api_key.of_engine(pool))
    by_name = {variable["name"]: variable for variable in made}
    for variable in engine.env:
        said = (
            {"value": variable.value} if variable.value_from is None else {"valueFrom": variable.value_from}
        )
        by_name[variable.name] = {"name": variable.name, **said}
    if engine.kind is EngineKind.VLLM:
        door.keep_path(by_name)
    return list(by_name.values())


def args(pool: Context, serve: bool) -> list[str]:
    """Return the operator's arguments, then the user's."""
    simulated = pool.spec.engine.kind is EngineKind.SIMULATED
    own = _simulated_args(pool) if simulated else [*_vllm_args(pool), *_group_args(pool, serve)]
    return [*own, *(engine_tls.args(pool) if serve else ()), *pool.spec.engine.args]


def _group_args(pool: Context, serve: bool) -> list[str]:
    """Return the arguments by which vLLM forms one engine of several nodes. It uses its own multiprocessing,
    because its images have not contained Ray since 0.19. Data-parallel ranks belong to the leader's server,
    which passes each request to the rank that it names. The leader listens at its address, because ZeroMQ
    listens at no DNS name, and tells its workers where to connect."""
    nodes = nodes_per_endpoint(pool)
    if nodes == 1:
        return []
    if ranks(pool) > 1:
        return [
            f"--data-parallel-size-local={ranks_per_pod(pool)}",
            f"--data-parallel-address={'$(POD_IP)' if serve else '$(LWS_LEADER_ADDRESS)'}",
            f"--data-parallel-rpc-port={MEETING_PORT}",
            *([] if serve else ["--headless"]),
        ]
    return [
        "--distributed-executor-backend=mp",
        f"--nnodes={nodes}",
        "--master-addr=$(LWS_LEADER_ADDRESS)",
        f"--master-port={MEETING_PORT}",
        *(["--node-rank=0"] if serve else ["--node-rank=$(LWS_WORKER_INDEX)", "--headless"]),
    ]


def _simulated_args(pool: Context) -> list[str]:
    model, engine = pool.spec.model, pool.spec.engine
    return [
        f"--listen={pool.any_address}:{names.ENGINE_PORT}",
        f"--metrics-listen={pool.any_address}:{names.METRICS_PORT}",
        f"--name={pool.pod_host}:{names.ENGINE_PORT}",
        f"--model={model.name}",
        *(f"--alias={alias}" for alias in model.aliases),
        *(f"--lora={lora.name}={lora.path}" for lora in model.loras),
        f"--block-size={engine.block_size}",
        f"--kv-tokens={engine.kv_pool_tokens}",
        *([f"--context-tokens={model.context_tokens}"] if model.context_tokens else []),
        f"--hash-algorithm={engine.hashing.algorithm}",
        *([f"--hash-seed={engine.hashing.seed}"] if engine.hashing.seed else []),
        *(["--scheduling=priority"] if pool.spec.routing.engine_priority.used else []),
        f"--events=tcp://{pool.any_address}:{EVENTS_PORT}",
        f"--replay=tcp://{pool.any_address}:{replay_port(pool)}",
        *(_simulated_handoff(pool) if pool.spec.mooncake.transfer is Transfer.HANDOFF else []),
        *(_simulated_offload(pool) if pool.spec.mooncake.transfer is Transfer.OFFLOAD else []),
    ]


def sleeps(pool: Context) -> bool:
    """Return whether the pool's engines may sleep."""
    return pool.spec.scaling is not None and pool.spec.scaling.sleeping > 0


def _simulated_handoff(pool: Context) -> list[str]:
    return [f"--bootstrap=0.0.0.0:{BOOTSTRAP_PORT}", f"--abort-timeout={abort_seconds(pool)}"]


def _simulated_offload(pool: Context) -> list[str]:
    tokens = int(quantity(pool.spec.mooncake.offload_size)) // pool.spec.model.kv_bytes_per_token
    return [
        f"--host-tokens={max(tokens, pool.spec.engine.block_size)}",
        *([f"--peer=0.0.0.0:{PEER_PORT}"] if peers(pool) else []),
    ]


def abort_seconds(pool: Context) -> int:
    """Return how long a giver keeps blocks that no taker fetches, and a taker waits for a giver: twice the
    longest prefill that the pool allows, or twice `routing.disaggregation.maxSeconds` where endpoints only
    prefill and that is longer, and a minute. The prefill of n tokens is predicted by the pool's
    `costModel`, else as on an H20 with a 30B-A3B model (57 s for 131,072), times its `prefillScale`."""
    tokens, cost = pool.spec.model.context_tokens, pool.spec.engine.cost_model
    token_s = 4.6e-5 if cost.prefill_token_seconds is None else cost.prefill_token_seconds
    pair_s = 6.0e-9 if cost.attention_seconds is None else cost.attention_seconds
    prefill_s = (token_s * tokens + pair_s * tokens**2 / 2) * pool.spec.engine.prefill_scale
    if pool.spec.prefill_replicas:
        prefill_s = max(prefill_s, pool.spec.routing.disaggregation.max_seconds)
    return 60 + ceil(2 * prefill_s)


def _vllm_args(pool: Context) -> list[str]:
    model, engine = pool.spec.model, pool.spec.engine
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{replay_port(pool)}",
        "topic": f"kv@{pool.pod_host}:{names.ENGINE_PORT}@{model.name}",
        "buffer_steps": REPLAYED_STEPS,
    }
    transfer = _transfer(pool)
    return [
        model_cache.source(model),
        "--served-model-name",
        model.name,
        *model.aliases,
        f"--host={pool.any_address.strip('[]')}",
        f"--port={names.ENGINE_PORT}",
        f"--max-model-len={model.context_tokens or 'auto'}",
        "--enable-prefix-caching",
        f"--block-size={engine.block_size}",
        f"--prefix-caching-hash-algo={engine.hashing.algorithm}",
        f"--kv-events-config={_json(events)}",
        *([f"--kv-transfer-config={_json(transfer)}"] if transfer else []),
        *([f"--tensor-parallel-size={engine.tensor_parallel}"] if engine.tensor_parallel > 1 else []),
        *([f"--pipeline-parallel-size={engine.pipeline_parallel}"] if engine.pipeline_parallel > 1 else []),
        *([f"--data-parallel-size={engine.data_parallel}"] if engine.data_parallel > 1 else []),
        *(["--scheduling-policy=priority"] if pool.spec.routing.engine_priority.used else []),
        *(["--enable-sleep-mode"] if sleeps(pool) else []),
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        *door.ARGS,
        *(["--enable-lora"] if model.loras else []),
        *(["--lora-modules", *(f"{lora.name}={lora.path}" for lora in model.loras)] if model.loras else []),
    ]


def _transfer(pool: Context) -> Object:
    """Return vLLM's --kv-transfer-config; empty without a transfer. Blocks that cannot be loaded are
    recomputed, so that no request fails. vLLM chooses an engine id for each process: an engine that came back
    under its old id would let the others wait for blocks of the process before. The processes of one endpoint
    need the same id, so where it spans nodes they are given one."""
    made = pool.spec.mooncake
    parts: list[Object] = []
    if made.transfer is Transfer.HANDOFF:
        direct: Object = {"mooncake_protocol": made.protocol}
        if made.devices:
            direct["device_name"] = made.devices
        parts.append(
            {
                "kv_connector": "MooncakeConnector",
                "kv_connector_module_path": door.CONNECTOR,
                "kv_role": "kv_both",
                "kv_connector_extra_config": direct,
            }
        )
    if made.transfer is Transfer.OFFLOAD:
        tier: Object = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": int(quantity(made.offload_size)),
            "self_describing_kv_events": True,
            "offload_prompt_only": False,
        }
        if peers(pool):
            tier["secondary_tiers"] = [{"type": "p2p", "host": "$(POD_IP)", "port": PEER_PORT}]
        parts.append(
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}
        )
    if made.store.enabled:
        pooled: Object = {
            "load_async": True,
            "save_decode_cache": made.store.save_decode_cache,
            "cache_prefix": kv_name(pool),
        }
        parts.append(
            {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": pooled,
            }
        )
    if not parts:
        return {}
    whole = (
        parts[0]
        if len(parts) == 1
        else {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": parts},
        }
    )
    group = {"engine_id": "$(LWS_LEADER_ADDRESS)"} if nodes_per_endpoint(pool) > 1 else {}
    return {**whole, **group, "kv_load_failure_policy": "recompute"}


def _json(value: Object) -> str:
    return json.dumps(value, separators=(",", ":"))

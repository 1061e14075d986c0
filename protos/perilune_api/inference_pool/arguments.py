"""Lists the flags of the programs that the operator runs which a pool may not give, and why.

A flag is compared as the program reads it: `--block_size`, `--block-size.x=1` and `--block-s` are all
`--block-size`, which follows from the spec; `--no-enable-prefix-caching` is its contrary. Whatever else an
engine takes is its own business.
"""

from collections.abc import Collection, Mapping, Sequence

from perilune_api.pool import SpecError

VLLM_ARGS = frozenset(
    {
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--block-size",
        "--enable-prefix-caching",
        "--kv-events-config",
        "--kv-transfer-config",
        "--prefix-caching-hash-algo",
        "--tensor-parallel-size",
        "-tp",
        "--pipeline-parallel-size",
        "-pp",
        "--distributed-executor-backend",
        "--scheduling-policy",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--max-model-len",
        "--enable-lora",
        "--lora-modules",
        "--api-key",
    }
)
"""vLLM's flags that follow from the spec: giving them in args is refused."""

SIMULATED_ARGS = frozenset(
    {
        "--listen",
        "--metrics-listen",
        "--name",
        "--model",
        "--alias",
        "--lora",
        "--block-size",
        "--kv-tokens",
        "--context-tokens",
        "--hash-algorithm",
        "--hash-seed",
        "--scheduling",
        "--events",
        "--replay",
        "--bootstrap",
        "--host-tokens",
        "--peer",
        "--abort-timeout",
        "--engine-id",
        "--api-key",
        "--ssl-certfile",
        "--ssl-keyfile",
    }
)
"""The same of `perilune engine`."""

GATEWAY_ARGS = frozenset(
    {
        "--kubernetes",
        "--pool",
        "--listen",
        "--admin",
        "--grace-seconds",
        "--drain-seconds",
        "--state-server",
        "--state-ca",
        "--state-cluster",
        "--log-level",
        "--log-format",
    }
)
"""The same of perilune-gateway. (A pod drains by its preStop hook.)"""

FORBIDDEN_ARGS: Mapping[str, str] = {
    "--disable-log-stats": "without metrics gateways know no engine's load, and engines never drain",
    "--uds": "Envoy, gateways and probes reach an engine by its port",
    "--headless": "Envoy, gateways and probes reach an engine by its port",
    **{
        f"--{name}": "set engine.tls, of which Envoy, gateways and probes know too"
        for name in (
            "ssl-keyfile",
            "ssl-certfile",
            "ssl-ca-certs",
            "ssl-cert-reqs",
            "ssl-ciphers",
            "enable-ssl-refresh",
        )
    },
    **dict.fromkeys(
        ("--prefill-context-parallel-size", "-pcp"),
        "an engine gets tensorParallel x pipelineParallel GPUs: more contexts need more of them",
    ),
    **dict.fromkeys(
        ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"),
        "the operator makes the group of an endpoint that spans nodes: set engine.pipelineParallel",
    ),
}
"""vLLM's flags with which an engine would not serve as the pool expects, and why or what to do."""

DATA_PARALLEL = ("--data-parallel", "-dp")
"""How vLLM's flags begin that make several engines one server."""

ELECTION = ("enable_ha", "ha_backend_type", "ha_backend_connstring", "etcd_endpoints", "enable_oplog")
"""Flags of mooncake_master by which masters elect a leader."""

ONE_SERVER = frozenset({"--api-server-count", "-asc"})
"""Flags that workers of an endpoint that spans nodes would not start with: they serve nothing."""


def check_vllm(args: Sequence[str], path: str) -> None:
    """Check vLLM's arguments. `path`: where they stand, for the error. Raises SpecError."""
    _check(args, path, VLLM_ARGS)
    for i, arg in enumerate(args):
        flag = _flag(arg)
        if flag.startswith(DATA_PARALLEL):
            raise SpecError(f"engine.dataParallel sets the data-parallel ranks - at `{path}[{i}]`")
        if meant := _meant(flag, FORBIDDEN_ARGS):
            raise SpecError(f"{meant} is not possible: {FORBIDDEN_ARGS[meant]} - at `{path}[{i}]`")


def check_vllm_group(args: Sequence[str], path: str) -> None:
    """Check what else holds for an endpoint that spans nodes. Raises SpecError."""
    for i, arg in enumerate(args):
        if _meant(_flag(arg), ONE_SERVER):
            raise SpecError(f"An endpoint that spans nodes has one API server - at `{path}[{i}]`")


def check_simulated(args: Sequence[str], path: str) -> None:
    """Check the arguments of `perilune engine`. Raises SpecError."""
    _check(args, path, SIMULATED_ARGS)


def check_master(args: Sequence[str], path: str) -> None:
    """Check the arguments of mooncake_master: engines and gateways would not find a leader that they do not
    know of. Raises SpecError."""
    for i, arg in enumerate(args):
        flag, _, value = arg.lstrip("-").partition("=")
        if flag.removeprefix("no") not in ELECTION:
            continue
        if flag == "ha_backend_type" and value and value != "etcd":
            words = (
                f"Mooncake's packages (0.3.13) answer UNAVAILABLE_IN_CURRENT_MODE to {value}, and elect in"
            )
            raise SpecError(f"{words} etcd alone: set mooncake.master.etcd - at `{path}[{i}]`")
        raise SpecError(f"mooncake.master.etcd sets --{flag}: leave it out - at `{path}[{i}]`")


def check_gateway(args: Sequence[str], path: str) -> None:
    """Check the arguments of perilune-gateway. Raises SpecError."""
    _check(args, path, GATEWAY_ARGS)


def check_gateway_field(args: Sequence[str], path: str, field: str, prefix: str) -> None:
    """Check the arguments of a pool whose spec.gateway sets the flags with this prefix by a field. Raises
    SpecError."""
    for i, arg in enumerate(args):
        if _flag(arg).startswith(prefix):
            raise SpecError(f"gateway.{field} sets {_flag(arg)}: leave it out - at `{path}[{i}]`")


def _check(args: Sequence[str], path: str, ours: frozenset[str]) -> None:
    for i, arg in enumerate(args):
        flag = _flag(arg)
        if meant := _meant(flag, ours) or _meant(flag.replace("--no-", "--", 1), ours):
            raise SpecError(f"The operator sets {meant} itself, from the spec - at `{path}[{i}]`")


def _flag(arg: str) -> str:
    """Return an argument's flag. vLLM also takes `--block_size` and `--kv-events-config.endpoint`, and `-n2`
    for `-n 2`."""
    flag = arg.split("=", 1)[0].split(".", 1)[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag.rstrip("0123456789")


def _meant(flag: str, known: Collection[str]) -> str:
    """Return which of these it is, or may abbreviate; empty if none: argparse takes `--disable-log-stat`, and
    refuses what could be one of several. (No other flag of vLLM's is the beginning of one of ours.)"""
    if flag in known:
        return flag
    return min((name for name in known if name.startswith(flag)), default="") if flag.strip("-") else ""

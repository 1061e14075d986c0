"""An object's `spec` → checked structs, or a SpecError that names the field.

1. *Shape*: types and ranges, as the API server has checked them already. Unknown fields are ignored.
2. *What the schema and its rules cannot know*: flags that the operator sets itself, what vLLM would not start
   with, quantities and labels inside free-form fields.
3. *The pool document* that the gateway would get has to be one that it takes.

Only what can be told from the spec alone: what an API server would refuse in the objects made of it, the
operator asks one (`perilune_operator.apply`).
"""

from urllib.parse import urlsplit

import msgspec

from perilune_api import moved_fields, names, pool, quantities, versions
from perilune_api.inference_pool import arguments, selected
from perilune_api.inference_pool.document import pool_document
from perilune_api.inference_pool.engine import EngineKind, EngineSpec
from perilune_api.inference_pool.gateway import GatewayMode, GatewaySpec
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.inference_pool.spec import InferencePoolSpec, PrefillScaling, Scaling, Signal
from perilune_api.pool import SpecError

OPERATOR_LABELS = frozenset({names.POOL_LABEL, names.COMPONENT_LABEL, names.ROLE_LABEL, names.DUTY_LABEL})
"""The labels by which the operator knows its pods. No podTemplate may set them."""
HANDOFF_ENV = frozenset({"VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"})
"""Environment variables that follow from the spec."""


def convert(spec: object) -> InferencePoolSpec:
    """Convert an object's `spec`, as the API server gives it, to checked structs. Ignore fields that are
    unknown here: they belong to a newer CRD, and the API server refuses typos. Raises SpecError with the
    path."""
    spec = moved_fields.with_policy_object(spec)
    if moved := moved_fields.explain(spec):
        raise SpecError(moved)
    try:
        made = msgspec.convert(versions.known(spec, InferencePoolSpec)[0], InferencePoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(str(error).replace("`$", "`$.spec", 1)) from None
    check(made)
    return _without_gateway(made) if made.gateway.served_by else made


def _without_gateway(spec: InferencePoolSpec) -> InferencePoolSpec:
    """Return the spec of a pool that another pool's gateway serves."""
    given = spec.gateway
    kept = GatewaySpec(
        mode=GatewayMode.NONE,
        parent=given.parent,
        clients=given.clients,
        served_by=given.served_by,
        replicas=0,
    )
    return msgspec.structs.replace(spec, gateway=kept)


def check(spec: InferencePoolSpec) -> None:
    """Check what the schema and its rules cannot know. Raises SpecError with the field's path."""
    if spec.engine.selector is not None:
        selected.check(spec)
    elif spec.engine.tls and not (spec.engine.tls.secret or spec.engine.tls.issuer):
        words = "The engines need a certificate: give a secret, or an issuer that writes one"
        raise SpecError(f"{words} - at `$.spec.engine.tls`")
    if spec.engine.tls and spec.gateway.mode is GatewayMode.INFERENCE_EXTENSION:
        words = "Implementations of the inference extension ask engines in plain text: leave it out"
        raise SpecError(f"{words} - at `$.spec.engine.tls`")
    if spec.engine.kind is EngineKind.VLLM:
        arguments.check_vllm(spec.engine.args, "$.spec.engine.args")
        _check_vllm(spec)
    else:
        arguments.check_simulated(spec.engine.args, "$.spec.engine.args")
        if spec.model.cache is not None:
            raise SpecError("Simulated engines load no model: leave it out - at `$.spec.model.cache`")
    if spec.prefill_replicas and spec.mooncake.transfer is not Transfer.HANDOFF:
        raise SpecError(
            "Endpoints that prefill for others hand KV over to them: set mooncake.transfer to handoff"
            " - at `$.spec.prefillReplicas`"
        )
    if spec.mooncake.transfer is Transfer.HANDOFF and not spec.gateway.served_by and not _has_gateway(spec):
        words = "Engines hand KV over, and prefill for others, when the pool's gateway says so"
        raise SpecError(f"{words}, and gateway.replicas is 0 - at `$.spec.mooncake.transfer`")
    arguments.check_gateway(spec.gateway.args, "$.spec.gateway.args")
    arguments.check_master(spec.mooncake.master.args, "$.spec.mooncake.master.args")
    if spec.mooncake.master.replicas > 1 and not spec.mooncake.master.etcd:
        words = "Masters elect their leader in etcd: name its addresses in mooncake.master.etcd, or have one"
        raise SpecError(f"{words} - at `$.spec.mooncake.master.replicas`")
    _check_waits(spec)
    _check_scaling(spec)
    _check_prefill_scaling(spec)
    _check_role_switching(spec)
    if spec.gateway.tls is not None:
        arguments.check_gateway_field(spec.gateway.args, "$.spec.gateway.args", "tls", "--tls")
    _check_tracing(spec.gateway)
    state = spec.gateway.state
    if state and state.ca_secret and not state.server.startswith("rediss:"):
        raise SpecError("Only rediss:// servers have certificates - at `$.spec.gateway.state.caSecret`")
    if state and state.server and not state.tls:
        words = "A server of yours speaks TLS if its address begins with rediss://, whatever this says"
        raise SpecError(f"{words} - at `$.spec.gateway.state.tls`")
    if state and state.password_secret and not state.server:
        words = (
            "The operator's own server needs no Secret: name the server whose password it is in state.server"
        )
        raise SpecError(f"{words} - at `$.spec.gateway.state.passwordSecret`")
    attached = (GatewayMode.ENVOY_GATEWAY, GatewayMode.INFERENCE_EXTENSION)
    if spec.gateway.mode in attached and spec.gateway.parent is None:
        raise SpecError(f"Mode {spec.gateway.mode} needs a Gateway - at `$.spec.gateway.parent`")
    if spec.gateway.route and spec.gateway.mode is GatewayMode.INFERENCE_EXTENSION:
        raise SpecError("Your own route names the InferencePool itself - at `$.spec.gateway.route`")
    _check_several(spec)
    _check_env(spec.engine)
    _check_pods(spec)
    pool.check(pool_document("check", "default", spec, pool.Topology()))


def _has_gateway(spec: InferencePoolSpec) -> bool:
    """Return whether the pool has a gateway of its own."""
    return spec.gateway.replicas != 0 or spec.gateway.min_replicas is not None


def _check_tracing(given: GatewaySpec) -> None:
    if given.tracing is None:
        return
    arguments.check_gateway_field(given.args, "$.spec.gateway.args", "tracing", "--traces")
    try:
        url = urlsplit(given.tracing.endpoint)
        known = url.hostname and url.port != 0
    except ValueError:
        known = False
    if not known:
        words = f"{given.tracing.endpoint!r} is no address: give http://HOST:PORT or https://HOST:PORT"
        raise SpecError(f"{words} - at `$.spec.gateway.tracing.endpoint`")


def _check_several(spec: InferencePoolSpec) -> None:
    """Check that one gateway can serve several pools so."""
    given = spec.gateway
    if given.serves and given.fail_open:
        words = "Envoy alone cannot tell which pool serves a model: set failOpen to false"
        raise SpecError(f"{words} - at `$.spec.gateway.failOpen`")
    if given.serves and given.mode is GatewayMode.INFERENCE_EXTENSION:
        raise SpecError("An InferencePool of the extension has one pool - at `$.spec.gateway.serves`")
    if given.serves and given.served_by:
        raise SpecError("It has no gateway to serve others with - at `$.spec.gateway.serves`")
    if given.served_by and (spec.prefill_replicas or spec.mooncake.transfer is Transfer.HANDOFF):
        words = (
            "Engines hand KV over only for their own pool's gateway: leave servedBy out, or choose another"
        )
        raise SpecError(f"{words} transfer - at `$.spec.mooncake.transfer`")


def _check_waits(spec: InferencePoolSpec) -> None:
    """Check that a decision comes before Envoy gives up the gateway and sends the request to any engine."""
    routing = spec.routing
    waits = {"limits.decisionSeconds": routing.limits.decision_seconds}
    holds = {}  # a request is held once at most
    if spec.prefill_replicas:
        holds["disaggregation.acceptSeconds"] = routing.disaggregation.accept_seconds
    if spec.mooncake.transfer is Transfer.HANDOFF and routing.pull.enabled:
        holds["pull.maxSeconds"] = routing.pull.max_seconds
    if holds:
        longest = max(holds, key=holds.__getitem__)
        waits[longest] = holds[longest]
    total = sum(waits.values())
    if total >= pool.DECISION_S:
        words = " + ".join(waits)
        last = [*waits][-1]
        raise SpecError(
            f"Envoy waits {pool.DECISION_S} s for a decision, and {words} are {total:g} s: make them less"
            f" - at `$.spec.routing.{last}`"
        )


def _check_scaling(spec: InferencePoolSpec) -> None:
    scaling = spec.scaling
    if scaling is None:
        return
    if not scaling.min_replicas and scaling.signal is Signal.METRIC:
        words = "Kubernetes' autoscalers keep one: use queueSeconds, kvUsage or ttftAttainment as signal"
        raise SpecError(f"{words} - at `$.spec.scaling.minReplicas`")
    if not scaling.min_replicas and spec.prefill_replicas:
        words = "Endpoints that only prefill would go on without any that serves: 1 is the least"
        raise SpecError(f"{words} - at `$.spec.scaling.minReplicas`")
    if not scaling.min_replicas and not spec.gateway.served_by and not _has_gateway(spec):
        words = "Gateways tell that a prompt found no endpoint, and gateway.replicas is 0: 1 is the least"
        raise SpecError(f"{words} - at `$.spec.scaling.minReplicas`")
    _check_sleeping(spec, scaling)
    if scaling.signal is Signal.METRIC:
        return
    if spec.gateway.served_by:
        words = "The operator reads it from the pool's own gateway, and servedBy leaves none: use metric"
        raise SpecError(f"{words} - at `$.spec.scaling.signal`")
    _check_target(scaling, "$.spec.scaling")


def _check_sleeping(spec: InferencePoolSpec, scaling: Scaling) -> None:
    if not scaling.sleeping:
        return
    others = {
        "signal: metric": scaling.signal is Signal.METRIC,
        "roleSwitching": spec.role_switching is not None,
        "engine.selector": spec.engine.selector is not None,
        "KV that leaves engines": spec.mooncake.transfer is not Transfer.NONE or spec.mooncake.store.enabled,
        "a pool without a gateway": not spec.gateway.served_by and not _has_gateway(spec),
    }
    if found := [name for name, is_so in others.items() if is_so]:
        raise SpecError(f"Endpoints cannot sleep with {found[0]} - at `$.spec.scaling.sleeping`")


def _check_prefill_scaling(spec: InferencePoolSpec) -> None:
    if spec.prefill_scaling is None:
        return
    if not spec.prefill_replicas:
        words = "It starts from prefillReplicas, and 0 is no endpoint that only prefills: set it to 1 or more"
        raise SpecError(f"{words} - at `$.spec.prefillScaling`")
    _check_target(spec.prefill_scaling, "$.spec.prefillScaling")


def _check_target(scaling: Scaling | PrefillScaling, path: str) -> None:
    target, first_tokens = quantities.quantity(scaling.target), scaling.signal is Signal.TTFT_ATTAINMENT
    right, words = target > 0, "seconds above 0"
    if first_tokens:
        right, words = 0 < target < 1, "a share of requests above 0 and below 1, such as 0.95"
    elif scaling.signal is Signal.KV_USAGE:
        right, words = 0 < target <= 1, "a share of the KV cache above 0, at most 1, such as 0.7"
    if not right:
        raise SpecError(f"{scaling.signal} needs {words} - at `{path}.target`")
    if first_tokens and scaling.ttft_seconds not in names.FIRST_TOKEN_BUCKETS_S:
        bounds = ", ".join(f"{bound:g}" for bound in names.FIRST_TOKEN_BUCKETS_S)
        raise SpecError(f"Gateways count first tokens within {bounds} s - at `{path}.ttftSeconds`")


def _check_role_switching(spec: InferencePoolSpec) -> None:
    if spec.role_switching is None:
        return
    if not spec.prefill_replicas or spec.replicas + spec.prefill_replicas < 3:
        words = (
            "Roles are switched between endpoints that serve and endpoints that prefill, of which one each"
        )
        raise SpecError(
            f"{words} stays: set prefillReplicas, and 3 endpoints in all - at `$.spec.roleSwitching`"
        )
    scales = spec.scaling is not None and spec.scaling.signal is not Signal.METRIC
    if scales or spec.prefill_scaling:
        words = (
            "Both would follow the same load: leave out roleSwitching, or the gateways' signals of scaling"
        )
        raise SpecError(f"{words} and prefillScaling - at `$.spec.roleSwitching`")


def _check_env(engine: EngineSpec) -> None:
    given = engine.env
    for i, variable in enumerate(given):
        at = f"at `$.spec.engine.env[{i}]`"
        if variable.value and variable.value_from is not None:
            raise SpecError(f"Either value or valueFrom - {at}")
        if variable.name in {earlier.name for earlier in given[:i]}:
            raise SpecError(f"{variable.name} is given twice - {at}")
        if variable.name == "PYTHONHASHSEED":
            raise SpecError(f"Give engine.hashing.seed instead - {at}")
        if variable.name in HANDOFF_ENV:
            raise SpecError(f"mooncake.transfer: handoff sets it - {at}")
        if variable.name == names.ENGINE_KEY_VARIABLE and engine.api_key is not None:
            raise SpecError(f"engine.apiKey sets {variable.name}: leave it out - {at}")


def _check_vllm(spec: InferencePoolSpec) -> None:
    """Refuse what its engines would not start with."""
    engine, seed = spec.engine, spec.engine.hashing.seed
    if seed and not (seed.isascii() and seed.isdigit() and len(seed) < 11 and int(seed) < 2**32):
        raise SpecError(
            f"{seed!r} is no seed: Python takes 0 to 4294967295 - at `$.spec.engine.hashing.seed`"
        )
    a_rank = engine.tensor_parallel * engine.pipeline_parallel
    if a_rank > engine.gpus_per_node and engine.data_parallel > 1:
        words = f"A data-parallel rank of {a_rank} GPUs spans nodes, which have {engine.gpus_per_node}: make"
        raise SpecError(f"{words} each rank an endpoint, by replicas - at `$.spec.engine.dataParallel`")
    if a_rank * engine.data_parallel > engine.gpus_per_node:
        if spec.mooncake.transfer is Transfer.HANDOFF:
            words = "Endpoints that span nodes cannot hand KV over: their processes need one engine id that"
            raise SpecError(f"{words} is new after every start - at `$.spec.mooncake.transfer`")
        arguments.check_vllm_group(engine.args, "$.spec.engine.args")
    named = [(spec.model.source, ".source"), (spec.model.name, ".name")]
    named += [(alias, f".aliases[{i}]") for i, alias in enumerate(spec.model.aliases)]
    for name, path in named:
        if name.startswith("-"):
            raise SpecError(f"vLLM would take {name!r} for a flag - at `$.spec.model{path}`")
    for i, lora in enumerate(spec.model.loras):
        if "=" in lora.name or lora.name.startswith("-"):
            raise SpecError(f"vLLM cannot tell {lora.name!r} from a path - at `$.spec.model.loras[{i}].name`")
        if not lora.path:
            raise SpecError(f"vLLM needs the path of {lora.name} - at `$.spec.model.loras[{i}].path`")
    resources = engine.resources
    for part, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        if engine.gpu_resource in amounts:
            words = "An engine gets tensorParallel x pipelineParallel GPUs, none are given here"
            raise SpecError(f"{words} - at `$.spec.engine.resources.{part}.{engine.gpu_resource}`")


def _check_pods(spec: InferencePoolSpec) -> None:
    """Check what goes into pods as it is."""
    given = [
        (spec.engine.resources, "$.spec.engine.resources"),
        (spec.gateway.resources, "$.spec.gateway.resources"),
        (spec.mooncake.master.resources, "$.spec.mooncake.master.resources"),
    ]
    for resources, path in given:
        quantities.check_resources(resources.requests, f"{path}.requests")
        quantities.check_resources(resources.limits, f"{path}.limits")
    for template, path in (
        (spec.engine.pod_template, "$.spec.engine.podTemplate"),
        (spec.gateway.pod_template, "$.spec.gateway.podTemplate"),
        (spec.mooncake.master.pod_template, "$.spec.mooncake.master.podTemplate"),
    ):
        quantities.check_template(template, path, OPERATOR_LABELS)

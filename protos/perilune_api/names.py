"""Strings that two processes agree on, each with where it comes from."""

from typing import Literal

GROUP = "perilune.dev"

# Endpoint picker protocol v1 (gateway-api-inference-extension, docs/proposals/004).
DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""Request header and `envoy.lb` metadata key: `ip:port[,ip:port…]`, in order of preference."""
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
"""Response metadata key: the endpoint that really served."""
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
"""A list of `ip:port`, or one comma-separated string: pick only from these."""
CONFORMANCE_SELECTION_HEADER = "test-epp-endpoint-selection"
CONFORMANCE_SERVED_HEADER = "x-conformance-test-served-endpoint"

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
HEALTH_SERVICES = ("", LIVENESS, "readiness", EXT_PROC_SERVICE, "inference-extension")

# Ours.
DECISION_HEADER = "x-perilune-decision"
"""Request: any value asks for it. Response: `<endpoint>; <reason>; request=<id>`."""
REQUEST_ID_HEADER = "x-request-id"
REFUSE_REASON_HEADER = "x-perilune-refused"
"""Response header of every answer that the gateway gives instead of an endpoint."""
POLICY_HEADER = "x-perilune-policy"
"""Request: decide this one request by another policy, where the pool allows it."""

# Session headers that clients send already, strongest first (Dynamo's documented list and others).
SESSION_HEADERS = (
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-smg-routing-key",
)
SUB_AGENT_HEADER = "x-claude-code-agent-id"
"""Beside `x-claude-code-session-id`: a sub-agent is a session of its own."""
PARENT_SESSION_HEADERS = (
    "x-dynamo-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-codex-parent-thread-id",
    "x-parent-session-id",
)
FINAL_TURN_HEADERS = ("x-perilune-session-final", "x-dynamo-session-final")
"""`true`: the session ends with this request; its binding is freed when the answer ends."""

# What a request asks of latency, as users of llm-d's and GIE's endpoint picker send it.
SLO_TTFT_HEADER = "x-slo-ttft-ms"
SLO_TPOT_HEADER = "x-slo-tpot-ms"
"""Numbers; 0 and below, as elsewhere: none of its own. What is no number is refused with 400."""
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Name of an InferenceObjective, which stands for a priority; the second is the older spelling."""

# Kubernetes: labels and annotations, written by the operator.
POOL_LABEL = "perilune.dev/pool"
"""On everything that belongs to a pool: its name."""
COMPONENT_LABEL = "perilune.dev/component"
"""On the same: a Component."""
Component = Literal["engine", "engine-worker", "gateway", "master"]
"""engine: pods that are endpoints, and what goes with them. engine-worker: further pods of an endpoint that
spans nodes. master: Mooncake's."""
ROLE_LABEL = "perilune.dev/role"
"""Of an engine pod: prefill, decode, both."""
EVENTS_PORT = "perilune.dev/kv-events-port"
"""Annotation of an engine pod: where it publishes KV events; the replay port is the next one."""
DRAINING = "perilune.dev/draining"
"""Annotation of an engine pod: known sessions finish there, new ones go elsewhere. Any value does; the
operator writes the time since when."""
DRAINED = "drained.perilune.dev/"
"""With a gateway pod's name behind it: annotation of a draining engine pod, by which that gateway says that
nothing of its own runs there any more and no session has been heard of lately. Its value is that of the
DRAINING that it answers, so that an answer to an earlier one counts for nothing."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' annotation: of a ReplicaSet's ready pods, the lowest goes first."""
NIC_COUNT = "perilune.dev/nic-count"
"""Label of a node: how many network cards carry KV."""
NIC_GBITS = "perilune.dev/nic-gbits"
"""Label of a node: how fast each of them is, in Gbit/s."""
ENGINE_PORT = 8000
"""Where an engine pod serves HTTP."""
ADMIN_PORT = 9003
"""Where a gateway pod serves its metrics and admin pages."""
LONGEST_LABEL = 63
"""Letters of a label's value, and of a Service's or a pod's name (DNS)."""
POOL_DOCUMENT = "pool.yaml"
"""Key of the ConfigMap that holds the pool document."""


def gateway_name(pool: str) -> str:
    """Name of a pool's gateway: Deployment, Service, ConfigMap with the pool document."""
    return f"{pool}-gateway"

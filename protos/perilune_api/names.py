"""Names and numbers on which two processes agree, with their sources."""

from typing import Literal

GROUP = "perilune.dev"

# Endpoint picker protocol v1 (gateway-api-inference-extension, docs/proposals/004).
DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""Request header, and key of `envoy.lb` metadata: `ip:port[,ip:port…]` in order of preference."""
DESTINATION_SERVED = "x-gateway-destination-endpoint-served"
"""Key of response metadata: the endpoint that actually served."""
CODE_DETAILS = "response.code_details"
"""Attribute of a response: Envoy's own words for how it came about."""
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
"""The endpoints from which to pick: a list of `ip:port`, or one comma-separated string."""
H2C = "kubernetes.io/h2c"
"""An InferencePool's `appProtocol`: its engines speak HTTP/2 without TLS, and nothing else."""
CONFORMANCE_SELECTION_HEADER = "test-epp-endpoint-selection"
CONFORMANCE_SERVED_HEADER = "x-conformance-test-served-endpoint"

EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
HEALTH_SERVICES = ("", LIVENESS, "readiness", EXT_PROC_SERVICE, "inference-extension")

DATA_PARALLEL_RANK_HEADER = "x-data-parallel-rank"
"""Request header by which vLLM is told which of its data-parallel ranks serves."""

AUTHORIZATION_HEADER = "authorization"
ENGINE_KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable by which vLLM is told the key that requests need."""

# Perilune's own headers.
DECISION_HEADER = "x-perilune-decision"
"""A request with any value asks for the header in the response: `<endpoint>; <reason>; request=<id>`, where
the pool's `routing.decisionHeader` says how the endpoint is named. `; served=<endpoint>` follows if
another one than the chosen has answered."""
ENGINE_SECRET_HEADER = "x-perilune-engine-secret"
"""Request header with the pool's secret, by which a gateway's requests to engines may have transfer
parameters; engines drop those of others."""
TRANSFER_TARGET_HEADER = "x-perilune-transfer-target"
"""Request header with the `ip:port` of the only engine that may obey the request's transfer parameters. A
proxy may send the same request to another engine again; that one drops them, because the transfer is
spent."""
INTERNAL_HEADERS = (ENGINE_SECRET_HEADER, TRANSFER_TARGET_HEADER, DATA_PARALLEL_RANK_HEADER)
"""Request headers that only gateways send to engines. Those of clients are removed before, as far ahead as
possible: by Envoy where the operator configures it, and by the gateway of each request that it routes."""
REQUEST_ID_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
"""Headers of W3C Trace Context."""
REFUSE_REASON_HEADER = "x-perilune-refused"
"""Response header of every request that the gateway refuses: the reason."""
CANARY_PAGE = "/canary"
"""Page of a gateway with the sums (perilune_api.trial) of each of its pools' canaries, by the pool's name."""
POLICY_HEADER = "x-perilune-policy"
"""Request header: the policy for this request alone, where the pool allows it."""

# Session headers that clients already send, in order of precedence (Dynamo's documented list and others).
SESSION_HEADERS = (
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "session_id",
    "conversation-id",
    "conversation_id",
    "x-opencode-session",
    "x-session-affinity",
    "x-session-id",
    "x-smg-routing-key",
)
SUB_AGENT_HEADER = "x-claude-code-agent-id"
"""Sent with `x-claude-code-session-id`: each sub-agent is a session of its own."""
PARENT_SESSION_HEADERS = (
    "x-dynamo-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-codex-parent-thread-id",
    "x-opencode-parent-session",
    "x-parent-session-id",
)
FINAL_TURN_HEADERS = ("x-perilune-session-final", "x-dynamo-session-final")
"""With the value `true`, the session ends with this request; its binding is freed when the answer ends."""

# Latency goals, as users of llm-d's and GIE's endpoint pickers send them.
SLO_TTFT_HEADER = "x-slo-ttft-ms"
SLO_TPOT_HEADER = "x-slo-tpot-ms"
"""Milliseconds. 0 and below stand for no goal, as in llm-d and GIE. Any other text is refused with 400."""
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Name of an InferenceObjective, which implies a priority. The second is the older spelling."""

# Kubernetes: labels and annotations, written by the operator.
POOL_LABEL = "perilune.dev/pool"
"""Label of everything that belongs to a pool: the pool's name."""
COMPONENT_LABEL = "perilune.dev/component"
"""Label of the same objects: a Component."""
Component = Literal["engine", "engine-worker", "prefill", "gateway", "master", "state"]
"""engine: pods that are endpoints, and their workloads. engine-worker: further pods of an endpoint that spans
nodes. prefill: pods that are endpoints and only prefill, and their workload. master: the Mooncake master.
state: the Valkey through which gateways share their state."""
ROLE_LABEL = "perilune.dev/role"
"""Label of an engine pod: always `both`, since every endpoint prefills and decodes."""
DUTY_LABEL = "perilune.dev/duty"
"""Label of an engine pod, a Duty, where the operator switches roles (roleSwitching). It may change while the
pod runs; without it a pod does what its component says."""
NEXT_DUTY = "perilune.dev/next-duty"
"""Annotation of an engine pod: the Duty that it takes over once its sessions have left."""
Duty = Literal["serve", "prefill"]
"""serve: the endpoint gets requests. prefill: it only prefills prompts for others."""
SERVER_LABEL = "perilune.dev/server"
"""Label of an engine pod that gets requests through a Service of several pools: the pool whose gateway serves
them. The operator writes it on running pods, so that a change of `serves` restarts none."""
PICKER_PROTOCOL = "perilune.dev/picker-protocol"
"""Annotation of an InferencePool of the inference extension: with the value `h2c`, its endpoint picker is
asked without TLS by Envoys that Perilune's extension server configures."""
EVENTS_PORT = "perilune.dev/kv-events-port"
"""Annotation of an engine pod: the port at which it publishes KV events. Each further data-parallel
rank has the next one; the replay ports follow in the same order."""
RANKS = "perilune.dev/ranks"
"""Annotation of an engine pod: the number of data-parallel ranks that its server serves, if there are
several."""
RANKS_PER_POD = "perilune.dev/ranks-per-pod"
"""Annotation of the first pod of an engine whose ranks are on several pods: the number of ranks in each."""
FIRST_RANK = "perilune.dev/first-rank"
"""Annotation of an engine pod whose server serves a part of its engine's ranks (vLLM
--data-parallel-hybrid-lb): the number of the first of them among all ranks of the engine."""
GROUP_SET = "leaderworkerset.sigs.k8s.io/name"
"""Label of a pod of a LeaderWorkerSet: the set's name."""
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
"""Label of a pod of a LeaderWorkerSet: the number of its group, which is one engine."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label of a pod of a LeaderWorkerSet: its number in the group; the leader has 0."""
BOOTSTRAP_PORT = "perilune.dev/kv-bootstrap-port"
"""Annotation of an engine pod: the port of its KV connector's bootstrap page, if it hands KV over."""
PEER_PORT = "perilune.dev/kv-peer-port"
"""Annotation of an engine pod: the port at which other engines read its host memory, if they can. Each
further data-parallel rank has the next one."""
DRAINING = "perilune.dev/draining"
"""Annotation of an engine pod that drains: its sessions finish there, and new ones go elsewhere. Any value
does; the operator writes the time at which draining began."""
ASLEEP = "perilune.dev/asleep"
"""Annotation of an engine pod whose engine is to sleep (`true`) or to be awake (`false`), where the operator
puts endpoints to sleep (scaling.sleeping). Gateways carry it out. Without it they leave the engine as it
is."""
SUPERSEDED = "perilune.dev/superseded"
"""Annotation of an engine pod that a rolling update will replace: sessions that have to leave another engine
go to engines without it, as long as these have room."""
TEMPLATE = "perilune.dev/template"
"""Annotation of an engine pod that hands KV over: a hash of its template, by which the operator tells pods of
an earlier one."""
KV_NAME = "perilune.dev/kv-name"
"""Annotation of an engine pod whose KV goes to other engines: a name of the model and of the arguments that
say what KV means. KV goes only between engines of one name."""
DRAINED = "perilune_pod_drained"
"""Metric of a gateway: 1 for a draining engine pod (label `pod`) on which it runs nothing any more, and of
which no session has sent a request lately. The label `mark` repeats the value of DRAINING, so that a report
about an earlier draining does not count."""
FINDINGS = "perilune_engine_findings"
"""Metric of a gateway: number of selected engines that have a Finding (label `finding`)."""
FIRST_TOKENS = "perilune_time_to_first_token_seconds"
"""Metric of a gateway: a histogram of the seconds from a request's arrival to its first token."""
FIRST_TOKEN_BUCKETS_S = (0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60)
"""Upper bounds of its buckets."""
QUIET_SECONDS = 6
"""Seconds without a request after which the preStop hook of an engine that hands KV over ends. Gateways leave
a terminating engine earlier."""
STOP_SECONDS = 30
"""Seconds between the latest end of an engine's preStop hook and the kill."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own annotation: a ReplicaSet first removes the ready pod with the lowest value."""
NIC_COUNT = "perilune.dev/nic-count"
"""Label of a node: the number of network cards that carry KV transfers."""
NIC_GBITS = "perilune.dev/nic-gbits"
"""Label of a node: the speed of each such card, in Gbit/s."""
ENGINE_PORT = 8000
"""Port at which an engine pod serves HTTP."""
METRICS_PORT = 8001
"""Port at which an engine pod serves its metrics and nothing else."""
ENGINE_CA_FOLDER = "/etc/perilune/engine-ca"
"""Folder in a gateway's pod with ca.crt: the CA certificates by which it trusts engines (engine.tls)."""
ADMIN_PORT = 9003
"""Port at which a gateway pod serves its metrics and admin pages."""
BUSY_INGEST = 0.5
"""Share of a gateway's event loop that KV events may take; above it too little is left for requests."""
BEHIND_S = 2.0
"""Delay of KV events in a gateway above which it is reported."""
LONGEST_LABEL = 63
"""The longest value of a label, and the longest name of a Service or pod (DNS), in characters."""
POOL_DOCUMENT = "pool.yaml"
"""Key of the ConfigMap that holds the pool document."""
SERVED_POOLS = "served-pools"
"""Key of that ConfigMap with the names of the other pools that the gateway serves, one a line."""


MASTER_PORT = 9003
"""Port at which the Mooncake master serves its metrics and pages."""


def picker_name(inference_pool: str) -> str:
    """Return the name under which the chart installs an endpoint picker for a standard InferencePool."""
    return f"{inference_pool}-perilune"[:LONGEST_LABEL].removesuffix("-")


def models_name(pool: str) -> str:
    """Return the name of the Service of all engines that a pool's gateway serves, if it serves other pools,
    too."""
    return f"{pool}-models"


def refusals_name(pool: str) -> str:
    """Return the name of the HTTPRoute of the requests that Envoy itself refuses for a pool."""
    return f"{pool}-refused"


def master_name(pool: str) -> str:
    """Return the name of the Mooncake master of a pool: its Deployment and its Service."""
    return f"{pool}-master"


def state_name(pool: str) -> str:
    """Return the name of the Valkey of a pool's gateways: its Deployment and its Service."""
    return f"{pool}-state"


def gateway_name(pool: str) -> str:
    """Return the name of a pool's gateway: its Deployment, its Service, and the ConfigMap with the pool
    document."""
    return f"{pool}-gateway"


def rendered_name(pool: str) -> str:
    """Return the name of the ConfigMap in which the operator remembers how it rendered a pool's pods."""
    return f"{pool}-rendered"

"""The resource `inferencepools.perilune.dev`: its names, and the rules (CEL) that an API server holds it to.

Fields and their types are `perilune_api.inference_pool`'s, which says who refuses what;
`perilune_api.crdgen` makes the CustomResourceDefinition of both. What a rule may cost is limited by the API
server (kubernetes.io/docs/reference/using-api/cel), which is why lists and texts have a greatest length.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from perilune_api import names
from perilune_api.conditions import Condition
from perilune_api.inference_pool.engine import Cache, EngineSpec, EngineTlsSpec
from perilune_api.inference_pool.gateway import GatewaySpec, TlsSpec
from perilune_api.inference_pool.spec import InferencePoolSpec, PrefillScaling, Rollout, Scaling
from perilune_api.inference_pool.topology import TopologySpec
from perilune_api.policies import PolicyChoice, PolicyName

PLURAL = "inferencepools"
KIND = "InferencePool"
VERSION = "v1alpha1"
API_VERSION = f"{names.GROUP}/{VERSION}"
SHORT_NAME = "ipool"


class Rule(NamedTuple):
    """One CEL rule and what a user reads when it is broken."""

    rule: str
    message: str
    field: str = ""
    """Path of the field to blame, relative to where the rule stands."""


RULES: Mapping[type, Sequence[Rule]] = {
    InferencePoolSpec: (
        Rule(
            "!has(self.scaling) || self.engine.kind != 'simulated' || self.scaling.maxReplicas <= 1000",
            "at most 1000 simulated endpoints",
            ".scaling.maxReplicas",
        ),
        Rule(
            "!has(self.prefillScaling) || self.engine.kind != 'simulated' || "
            "self.prefillScaling.maxReplicas <= 1000",
            "at most 1000 simulated endpoints",
            ".prefillScaling.maxReplicas",
        ),
        Rule(
            "self.engine.kind != 'simulated' || !(has(self.mooncake.store) && self.mooncake.store.enabled)",
            "simulated engines have no store: leave it out of mooncake",
            ".mooncake",
        ),
        Rule(
            "has(self.engine.selector) || (has(self.model.name) && self.model.name != '')",
            "name the model, as requests do: only engines that engine.selector selects tell it",
            ".model.name",
        ),
        Rule(
            "(has(self.model.name) ? self.model.name : '') == "
            "(has(oldSelf.model.name) ? oldSelf.model.name : '')",
            "the model's name cannot change: sessions, caches and dashboards hang on it; make another pool",
            ".model.name",
        ),
    ),
    Cache: (
        Rule(
            "[has(self.claim) && self.claim != '', has(self.hostPath) && self.hostPath != '', "
            "has(self.image) && self.image != ''].filter(given, given).size() == 1",
            "a cache is one of claim, hostPath and image",
        ),
    ),
    EngineSpec: (
        Rule(
            "self.kind != 'vllm' || self.blockSize % 8 == 0",
            "blockSize must be a multiple of 8, as vLLM's attention kernels need (16 is usual)",
            ".blockSize",
        ),
        Rule(
            "self.tensorParallel <= self.gpusPerNode || self.tensorParallel % self.gpusPerNode == 0",
            "tensorParallel must fit into one node or fill whole nodes",
            ".tensorParallel",
        ),
        Rule(
            "!has(self.hashing) || !self.hashing.algorithm.startsWith('xxhash') || "
            "(has(self.hashing.seed) && self.hashing.seed != '')",
            "hashing.seed is needed with xxhash: without it every engine hashes differently",
            ".hashing",
        ),
        Rule(
            "self.blockSize == oldSelf.blockSize", "blockSize cannot change: make another pool", ".blockSize"
        ),
        Rule("self.kind == oldSelf.kind", "the kind of engine cannot change: make another pool", ".kind"),
        Rule(
            "has(self.selector) == has(oldSelf.selector)",
            "a pool keeps running engines of its own, or selecting those of others: make another pool",
            ".selector",
        ),
        Rule(
            "has(self.tls) == has(oldSelf.tls)",
            "TLS of engines stays on or off, since Envoy asks all of them in one way: make another pool",
            ".tls",
        ),
    ),
    TopologySpec: (
        Rule(
            "!has(self.levels) || self.levels.all(a, self.levels.filter(b, b.name == a.name).size() == 1)",
            "a level may be given once",
            ".levels",
        ),
        Rule(
            "!has(self.levels) || self.levels.map(l, l.name) == "
            "['rack', 'spine', 'zone', 'region'].filter(n, self.levels.exists(l, l.name == n))",
            "levels go from narrow to wide: rack, spine, zone, region",
            ".levels",
        ),
        Rule(
            "!has(self.placement) || "
            "self.placement.all(a, self.placement.filter(b, b.level == a.level && "
            "(b.mode == 'together') == (a.mode == 'together')).size() == 1)",
            "a level may be placed by once, and kept together by once",
            ".placement",
        ),
        Rule(
            "!has(self.placement) || !has(self.levels) || self.levels.size() == 0 || "
            "self.placement.all(p, p.level == 'node' || self.levels.exists(l, l.name == p.level))",
            "placement by a level that levels do not name: give its labels too",
            ".placement",
        ),
    ),
    GatewaySpec: (
        Rule(
            "has(self.minReplicas) == has(self.maxReplicas)",
            "minReplicas and maxReplicas go together",
            ".minReplicas",
        ),
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas must not be above maxReplicas",
            ".minReplicas",
        ),
    ),
    TlsSpec: (
        Rule(
            "(has(self.secret) && self.secret != '') || (has(self.issuer) && self.issuer != '')",
            "tls needs a secret, or an issuer that writes one",
        ),
    ),
    EngineTlsSpec: (
        Rule(
            "(has(self.secret) && self.secret != '') || (has(self.issuer) && self.issuer != '') || "
            "(has(self.caSecret) && self.caSecret != '')",
            "tls needs a secret, or an issuer that writes one; with engine.selector caSecret",
        ),
    ),
    Scaling: (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be above maxReplicas",
            ".minReplicas",
        ),
    ),
    PrefillScaling: (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be above maxReplicas",
            ".minReplicas",
        ),
        Rule(
            "self.signal in ['queueSeconds', 'ttftAttainment']",
            "endpoints that only prefill follow queueSeconds or ttftAttainment",
            ".signal",
        ),
    ),
    Rollout: (
        Rule(
            "!(string(self.maxUnavailable) in ['0', '0%'] && string(self.maxSurge) in ['0', '0%'])",
            "maxUnavailable and maxSurge cannot both be 0: nothing could ever be replaced",
            ".maxUnavailable",
        ),
    ),
}
"""Struct → the rules that its place in the schema has."""

SHAPES: Mapping[type, Sequence[Mapping[str, Any]]] = {
    PolicyChoice: (
        {"properties": {"name": {"enum": [str(name) for name in PolicyName]}}},
        {"required": ["outside"]},
    ),
}
"""Struct → shapes, of which it must have one. Unlike a rule, a shape leaves stored values alone that a former
version allowed with another type: the API server cannot evaluate a rule about those, and refuses every change
of the object. `policy` was a text in 0.1.0."""

NAME_RULE = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$')",
    "a pool's name begins those of its Services and pods: a small letter, then at most 44 more, digits or -",
)
"""The rule and message for the whole object."""

DERIVED: Mapping[type, frozenset[str]] = {
    EngineSpec: frozenset({"store", "store_master"}),
    EngineTlsSpec: frozenset({"ca_file"}),
}
"""Fields that the operator fills in: not part of what users write."""

NAMED: Mapping[tuple[type, str], type[StrEnum]] = {(PolicyChoice, "name"): PolicyName}
"""Texts whose usual values are an enum's: the schema describes these, and takes others too."""

SHOWN = frozenset({PolicyChoice})
"""Groups deep in `spec` whose defaults stored objects show: `kubectl get` prints the policy's name."""

GROWING: frozenset[type] = frozenset({Condition})
"""Enums for which the schema takes other values too, so that a newer operator can write them under this
CRD."""

"""Former fields of pools: where those of the flat `routing.params` are now, for the error that refuses them,
and `routing.policy` as 0.1.0 had it, which is still read."""

from collections.abc import Mapping

PARAMS: Mapping[str, str] = {
    "hotPendingTokens": "policy.ear.hotPendingTokens",
    "cooldownSeconds": "policy.ear.cooldownSeconds and migration.cooldownSeconds",
    "conductorArm": "policy.conductor.arm",
    "maxQueueLength": "policy.conductor.maxQueueLength",
    "minHitRatio": "policy.conductor.minHitRatio",
    "hotCacheThreshold": "migration.replicateScore",
    "dynamoTemperature": "policy.dynamo.temperature and policy.dynamoProduct.temperature",
    "dynamoPrefillLoadScale": "policy.dynamo.prefillLoadScale",
    "dynamoDeviceCredit": "policy.dynamo.deviceCredit and policy.dynamoProduct.deviceCredit",
    "dynamoHostCredit": "policy.dynamo.hostCredit and policy.dynamoProduct.hostCredit",
    "dynamoDiskCredit": "policy.dynamo.diskCredit and policy.dynamoProduct.diskCredit",
    "dynamoV1OverlapWeight": "policy.dynamoV1.overlapWeight",
    "kvLinearHitWeight": "policy.kvLinear.hitWeight",
    "kvLinearLoadWeight": "policy.kvLinear.loadWeight",
    "expectedOutputTokens": "policy.perilune.expectedOutputTokens",
    "interferenceWeight": "policy.perilune.interferenceWeight",
    "leastGainSeconds": "policy.perilune.leastGainSeconds",
    "migrationWorth": "migration.worth",
    "hotPendingSeconds": "migration.hotPendingSeconds",
    "rackPressure": "migration.rackPressure",
    "loadPersistence": "migration.loadPersistence",
    "maxRemainingTurns": "migration.maxRemainingTurns",
    "migrationsPerMinute": "migration.movesPerMinute",
    "ageingWeight": "enginePriority.ageingWeight",
}
GONE = frozenset(
    {
        "kvcacheBalancingThreshold",
        "migrationLinkBytes",
        "maxLocalPrefillTokens",
        "maxPrefillQueue",
    }
)
"""Fields that no gateway acted on, so that they have no new place."""


def with_policy_object(spec: object) -> object:
    """Return the spec with `policy: {name: NAME}` for `policy: NAME`. The CRD of 0.1.0 wrote the latter
    into every pool, as a default, so pools whose owners never wrote it have it."""
    routing = spec.get("routing") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(routing, Mapping):
        return spec
    policy = routing.get("policy")
    if not isinstance(policy, str):
        return spec
    return {**spec, "routing": {**routing, "policy": {"name": policy}}}


def explain(spec: object) -> str:
    """Say which fields of a `spec` have moved, and where to; return an empty text if it has no former
    field."""
    routing = spec.get("routing") if isinstance(spec, Mapping) else None
    if not isinstance(routing, Mapping):
        return ""
    if isinstance(policy := routing.get("policy"), str):
        return f"Write `policy: {{name: {policy}}}`: a policy is an object - at `$.spec.routing.policy`"
    params = routing.get("params")
    if not isinstance(params, Mapping):
        return ""
    said = [f"{name} is now {where}" for name, where in PARAMS.items() if name in params]
    said += [f"{name} is gone, since no gateway acted on it" for name in sorted(GONE) if name in params]
    cure = "; ".join(said) or "Each policy has its own block in routing.policy"
    return f"{cure} - at `$.spec.routing.params`"

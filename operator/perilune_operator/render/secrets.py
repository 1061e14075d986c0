"""Which Secret a pool's pods refer to, and which they referred to before. The operator makes the Secret of
random values and never reads it; the kubelet passes the values.

The name follows from the pool's uid and `spec.secrets.rotation`, so another word is another Secret, and pods
that have to know it roll by themselves. Meanwhile nothing is refused:

    engines accept the new secret and the one that gateways send ─▶ all have rolled ─▶ gateways follow

The facts are the pod templates in force. Pods of an earlier version have their secrets as literal values,
which stay until their template changes anyway. Pure.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_operator.observe.facts import Object

ENGINE_SECRET, STATE_PASSWORD = "engine-secret", "state-password"
"""Keys of the Secret."""
CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
"""Keys of the Secret with the certificate of the operator's Valkey."""
VARIABLE, PREVIOUS_VARIABLE = "PERILUNE_ENGINE_SECRET", "PERILUNE_ENGINE_SECRET_PREVIOUS"
PASSWORD_VARIABLE = "PERILUNE_STATE_PASSWORD"
"""Environment variable with the password, of gateways and of the operator's Valkey."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The sources of a secret, as environment variables have them."""

    current: Object
    previous: Object | None = None
    """What is accepted in addition."""

    def env(self) -> list[Object]:
        previous = [{"name": PREVIOUS_VARIABLE, **self.previous}] if self.previous else []
        return [{"name": VARIABLE, **self.current}, *previous]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The secrets of a pool's pods."""

    name: str
    """The Secret that new pods refer to."""
    engines: Pair
    gateways: Pair
    state: Object
    """The source of the password of the operator's Valkey."""
    certificate: str
    """The Secret with the certificate of the operator's Valkey; empty if it speaks plain text."""


def choose(
    pool: str,
    uid: str,
    spec: InferencePoolSpec,
    in_force: Mapping[str, Any] = {},
    *,
    rolling: bool = False,
    follows: bool = True,
    state_tls: bool = True,
) -> Chosen:
    """Choose the secrets. `in_force`: the pod templates in force, by component. `rolling`: some engines are
    of an earlier template. `follows`: pods follow this version of the operator now. `state_tls`: whether the
    operator's Valkey speaks TLS."""
    name = spec.secrets.name or _name(pool, uid, spec.secrets.rotation)
    wanted = _reference(name, ENGINE_SECRET)
    engines, sent = _pair(in_force.get("engine")), _pair(in_force.get("gateway"))
    accept = _next(wanted, engines, sent)
    known = engines is None or (engines.current == wanted and not rolling)
    send = wanted if known else _sent(wanted, engines, sent)
    return Chosen(
        name,
        accept,
        _next(send, sent, sent),
        _state(name, in_force, spec, follows=follows),
        _name(pool, uid, spec.secrets.rotation, "state-tls") if state_tls else "",
    )


def _name(pool: str, uid: str, rotation: str, kind: str = "secrets") -> str:
    return f"{pool}-{kind}-{hashlib.sha256(f'{uid} {rotation}'.encode()).hexdigest()[:8]}"


def _reference(name: str, key: str) -> Object:
    return {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _next(wanted: Object, now: Pair | None, sent: Pair | None) -> Pair:
    """Return the pair to render, and change nothing without need, since a change of the pair replaces
    pods."""
    if now is not None and now.current == wanted:
        return now
    before = sent or now
    if before is None or before.current == wanted:
        return Pair(wanted)
    return Pair(wanted, _optional(before.current))


def _optional(source: Object) -> Object:
    """Return the same source, made optional, so that a pod starts without it: a rotated Secret may be
    deleted."""
    if "valueFrom" not in source:
        return source
    reference = source["valueFrom"]["secretKeyRef"]
    return {"valueFrom": {"secretKeyRef": {**reference, "optional": True}}}


def _sent(wanted: Object, engines: Pair | None, sent: Pair | None) -> Object:
    """Return what gateways send until all engines know the new secret."""
    if sent is not None:
        return sent.current
    if engines is None:
        return wanted
    return engines.previous if engines.current == wanted and engines.previous else engines.current


def _state(name: str, in_force: Mapping[str, Any], spec: InferencePoolSpec, *, follows: bool) -> Object:
    """Return the password of the server of shared state. The server has one password, so its pod and the
    gateways change it together. A literal one of an earlier version stays until pods follow this version, or
    a new one is asked for."""
    now = _variable(in_force.get("state"), PASSWORD_VARIABLE)
    asked = spec.secrets.name or spec.secrets.rotation
    if now is not None and "value" in now and not (follows or asked):
        return now
    return _reference(name, STATE_PASSWORD)


def _pair(template: Any) -> Pair | None:
    """Return the secret in a pod template; None if it has none."""
    current = _variable(template, VARIABLE)
    return None if current is None else Pair(current, _variable(template, PREVIOUS_VARIABLE))


def _variable(template: Any, name: str) -> Object | None:
    """Return the source of an environment variable in a template of pods, or of a group's leader and
    workers."""
    if isinstance(template, list):
        found = (_variable(each, name) for each in template)
        return next((source for source in found if source is not None), None)
    if not isinstance(template, dict):
        return None
    if template.get("name") == name:
        return {field: value for field, value in template.items() if field != "name"}
    return _variable(list(template.values()), name)


def secret(metadata: Object) -> Object:
    """Return the Secret to create, whose values the writer makes up. `metadata`: name, labels and owner."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


def certificate(metadata: Object) -> Object:
    """Return the Secret for a certificate, which the writer makes."""
    return {**secret(metadata), "type": "kubernetes.io/tls"}

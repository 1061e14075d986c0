"""Pods that others run (`engine.selector`) → endpoints, and a pool document completed by what engines tell.

Pure. Where a pod's KV events come from, its role and its ranks follow, in this order, from

- `engine.selector` itself (eventsPort, replayPort);
- Perilune's own annotations (names.EVENTS_PORT, …), if its owner has put them into the pod's template;
- the arguments of its containers: vLLM's --kv-events-config and --data-parallel-size, as an argument or
  within a shell's line;
- labels: llm-d's and KServe's `llm-d.ai/role`, and AIBrix' `model.aibrix.ai/kv-events-enabled`, which stands
  for the ports 5557 and 5558.

A pod that only prefills for others (`llm-d.ai/role: prefill`) gets no requests, since the gateway does not
speak to its connector; one that has a bootstrap page (names.BOOTSTRAP_PORT) does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from perilune_api import names
from perilune_api.findings import EVENTS_PORT, REPLAY_PORT
from perilune_api.pool import (
    EndpointSpec,
    HashAlgorithm,
    Lora,
    Pool,
    Role,
    Selector,
    SpecError,
    check,
)
from perilune_gateway.feeds.pods import port_in, up
from perilune_gateway.model.engine_facts import EngineFacts

Object = dict[str, Any]

ROLE_LABEL = "llm-d.ai/role"
"""Role of a pod of llm-d, and of KServe's LLMInferenceService: `prefill`, `decode`, `both`, and others that
get clients' requests. No label: `both`."""
AIBRIX_EVENTS_LABEL = "model.aibrix.ai/kv-events-enabled"
MOST_RANKS = 256


@dataclass(frozen=True, slots=True)
class Published:
    """Where an engine publishes KV events."""

    port: int = 0
    """Of its first rank; 0: it publishes none, or not at a port of its own."""
    replay_port: int = 0
    ranks: int = 1
    elsewhere: str = ""
    """The address to which it connects and sends its events, instead of listening; else empty."""


def published(pod: Object, selector: Selector) -> Published:
    """Where the engine of a pod publishes KV events."""
    meta = pod["metadata"]
    annotations, labels = meta.get("annotations") or {}, meta.get("labels") or {}
    words = " ".join(_words(pod))
    ranks = _ranks(annotations.get(names.RANKS, "")) or _ranks(_after(_RANKS, words)) or 1
    if selector.events_port:
        return Published(selector.events_port, selector.replay_port, ranks)
    if port := port_in(annotations.get(names.EVENTS_PORT, "")):
        return Published(port, port + ranks, ranks)
    if (config := _config(words)) is not None:
        return _by_config(config, ranks)
    if labels.get(AIBRIX_EVENTS_LABEL) == "true":
        return Published(EVENTS_PORT, REPLAY_PORT, ranks)
    return Published(ranks=ranks)


def _by_config(config: Object, ranks: int) -> Published:
    """By the value of --kv-events-config, whose defaults are vLLM's."""
    if config.get("enable_kv_cache_events") is not True or config.get("publisher", "zmq") != "zmq":
        return Published(ranks=ranks)
    endpoint = str(config.get("endpoint") or f"tcp://*:{EVENTS_PORT}")
    port = _listening(endpoint)
    if not port:
        return Published(ranks=ranks, elsewhere=endpoint)
    return Published(port, _listening(str(config.get("replay_endpoint") or "")), ranks)


def _listening(address: str) -> int:
    """Return the port at which an engine listens that was told this address; 0 if it connects there instead.
    (vLLM listens where it is told `*` or `::`.)"""
    _, _, place = address.partition("tcp://")
    host, _, port = place.rpartition(":")
    return port_in(port) if "*" in host or "::" in host else 0


_CONFIG = re.compile(r"--kv[-_]events[-_]config(?:=|\s+)['\"]?(?=\{)")
_DOTTED = re.compile(r"--kv[-_]events[-_]config\.([a-z_]+)(?:=|\s+)['\"]?([^\s'\"]+)")
_RANKS = re.compile(
    r"(?:--data[-_]parallel[-_]size[-_]local|--data[-_]parallel[-_]size|-dpl|-dp)(?:=|\s+)([0-9]+)\b"
)
_json = msgspec.json.Decoder(Object)


def _config(words: str) -> Object | None:
    """Return the value of --kv-events-config in a line of arguments; None without one that can be read."""
    if found := _CONFIG.search(words):
        for text in (words[found.end() :], words[found.end() :].replace("\\", "")):
            end = text.find("}")
            try:
                return _json.decode(text[: end + 1])
            except msgspec.DecodeError:
                continue
        return None
    pairs = dict(_DOTTED.findall(words))
    if not pairs:
        return None
    return {**pairs, "enable_kv_cache_events": pairs.get("enable_kv_cache_events", "").lower() == "true"}


def _after(pattern: re.Pattern[str], words: str) -> str:
    found = pattern.search(words)
    return found[1] if found else ""


def _ranks(text: str) -> int:
    return min(int(text), MOST_RANKS) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def _words(pod: Object) -> Iterator[str]:
    for container in pod.get("spec", {}).get("containers") or ():
        for word in (*(container.get("command") or ()), *(container.get("args") or ())):
            yield str(word)


def http_port(pod: Object, selector: Selector) -> int:
    """Return the number of the port of a pod's HTTP server; 0 if the pod has no port of that name."""
    if isinstance(selector.port, int):
        return selector.port
    for container in pod.get("spec", {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == selector.port:
                return int(port.get("containerPort", 0))
    return 0


def role(pod: Object) -> Role:
    """Return the role that a pod's labels name."""
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    named = labels.get(names.DUTY_LABEL) or labels.get(ROLE_LABEL) or ""
    if named == "prefill":
        return Role.PREFILL
    return Role.DECODE if named == "decode" else Role.BOTH


def endpoint(pod: Object, selector: Selector) -> EndpointSpec | None:
    """Return the endpoint of a selected pod; None for a pod that has no address, has not started, or only
    prefills without a connector that the gateway speaks to."""
    meta, there, port = pod["metadata"], up(pod), http_port(pod, selector)
    if there is None or not port:
        return None
    host, ready = there
    annotations = meta.get("annotations") or {}
    bootstrap, peer = (
        port_in(annotations.get(names.BOOTSTRAP_PORT, "")),
        port_in(annotations.get(names.PEER_PORT, "")),
    )
    if role(pod) is Role.PREFILL and not bootstrap:
        return None
    told = published(pod, selector)
    events = _addresses(host, told.port, told.ranks)
    return EndpointSpec(
        address=f"{host}:{port}",
        node=pod.get("spec", {}).get("nodeName", ""),
        events=events,
        replay=_addresses(host, told.replay_port, told.ranks) if events else (),
        draining=names.DRAINING in annotations,
        ready=ready,
        bootstrap=f"{host}:{bootstrap}" if bootstrap else "",
        role=role(pod),
        peer=f"{host}:{peer}" if peer and not bootstrap else "",
        instance=meta.get("uid", ""),
    )


def _addresses(host: str, port: int, ranks: int) -> tuple[str, ...]:
    """One address for each rank; none where the ports would end above the last one."""
    return tuple(f"tcp://{host}:{port + rank}" for rank in range(ranks)) if 0 < port <= 65_536 - ranks else ()


def completed(document: Pool, told: EngineFacts) -> Pool:
    """Return the document with what an engine tells, where the document leaves it open. Raises SpecError if
    it serves another model than the document names."""
    model, engine = document.spec.model, document.spec.engine
    served = told.model
    if served is None:
        raise SpecError(f"{told.trouble or '/v1/models names no model'} - at `$.spec.model.name`")
    own = {m.id for m in told.models if not m.parent}
    if model.name and model.name not in own:
        raise SpecError(
            f"The engines serve {', '.join(sorted(own))}, not {model.name}: name it so, or leave it out"
            " - at `$.spec.model.name`"
        )
    name = model.name or served.id
    known = {name, *model.aliases, *(lora.name for lora in model.loras)}
    algorithms = {algorithm.value: algorithm for algorithm in HashAlgorithm}
    algorithm = algorithms.get(told.hash_algorithm, engine.hashing.algorithm)
    spec = msgspec.structs.replace(
        document.spec,
        model=msgspec.structs.replace(
            model,
            name=name,
            aliases=(*model.aliases, *sorted(own - known)),
            loras=(
                *model.loras,
                *(Lora(m.id, m.root) for m in told.models if m.parent and m.id not in known),
            ),
            context_tokens=model.context_tokens or served.context_tokens,
        ),
        engine=msgspec.structs.replace(
            engine,
            block_size=told.block_size or engine.block_size,
            kv_pool_tokens=told.kv_tokens or engine.kv_pool_tokens,
            hashing=msgspec.structs.replace(engine.hashing, algorithm=algorithm),
        ),
    )
    made = msgspec.structs.replace(document, spec=spec)
    check(made)
    return made

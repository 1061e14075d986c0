"""Pods that others run (`engine.selector`) → endpoints, and a pool document completed by what engines tell.

Pure. Where a pod's KV events come from, its role and its ranks follow, in this order, from

- `engine.selector` itself (eventsPort, replayPort);
- Perilune's own annotations (names.EVENTS_PORT, …), if its owner has put them into the pod's template;
- the arguments of its containers: vLLM's --kv-events-config and --data-parallel-…, as an argument, within a
  shell's line, or in a variable of the container that one of these names;
- labels: llm-d's and KServe's `llm-d.ai/role`, and AIBrix' `model.aibrix.ai/kv-events-enabled`, which stands
  for the ports 5557 and 5558;
- for KV events and ranks, the engine's own word (`/kv_event_sources`).

A server may have all ranks of its engine, some of which run in other pods (headless ones, which are no
endpoints), or its own part of them (vLLM's hybrid and external balancing). Requests number the ranks of the
server from 0; metrics and the ports of KV events number them among all ranks of the engine.

A pod with several HTTP ports (`furtherPorts`) has an engine at each, whose events' ports follow each other as
those of ranks do.

A pod that only prefills or encodes for others (`llm-d.ai/role: prefill`, `encode`, `encode-prefill`) gets no
requests, since the gateway does not speak to its connector; one that prefills and has a bootstrap page
(names.BOOTSTRAP_PORT) does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from perilune_api import names
from perilune_api.findings import EVENTS_PORT, REPLAY_PORT
from perilune_api.foreign_bytes import UNREADABLE
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
from perilune_gateway.feeds import groups
from perilune_gateway.feeds.pods import port_in, up
from perilune_gateway.model.engine_facts import EngineFacts

Object = dict[str, Any]

ROLE_LABEL = "llm-d.ai/role"
"""Role of a pod of llm-d, and of KServe's LLMInferenceService. No label: `both`."""
HELPERS = ("prefill", "encode", "encode-prefill")
"""Roles of pods that answer no client. Those of others are `decode`, `both`, `prefill-decode` and
`encode-prefill-decode`."""
AIBRIX_EVENTS_LABEL = "model.aibrix.ai/kv-events-enabled"
MOST_RANKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Where an engine publishes KV events."""

    port: int = 0
    """The port of rank 0's events. 0 if it publishes none, or sends them elsewhere."""
    replay_port: int = 0
    ranks: int = 1
    """Number of the server's ranks."""
    elsewhere: str = ""
    """The address to which it connects and sends its events, instead of listening; else empty."""
    first_rank: int = 0
    """Number of its first rank among all ranks of its engine."""
    per_pod: int = 0
    """Number of ranks in each pod, where pods of the same group run some of them. 0: all are in this one."""


def published(pod: Object, selector: Selector) -> Published:
    """Where the engine of a pod publishes KV events."""
    meta = pod["metadata"]
    annotations, labels = meta.get("annotations") or {}, meta.get("labels") or {}
    words = " ".join(_words(pod))
    ranks = _ranks(pod, words)
    if ranks is None:  # only the engine knows at which ports its own ranks publish
        return Published()
    if selector.events_port:
        return replace(ranks, port=selector.events_port, replay_port=selector.replay_port)
    if port := port_in(annotations.get(names.EVENTS_PORT, "")):
        return replace(ranks, port=port, replay_port=port + ranks.ranks)
    if (config := _config(words)) is not None:
        return _by_config(config, ranks, _sglang_page(words))
    if labels.get(AIBRIX_EVENTS_LABEL) == "true":
        return replace(ranks, port=EVENTS_PORT, replay_port=REPLAY_PORT)
    return ranks


def _ranks(pod: Object, words: str) -> Published | None:
    """Return the ranks of a pod's server; None if its arguments leave them to a shell's variables."""
    annotations = pod["metadata"].get("annotations") or {}
    if noted := _number(annotations.get(names.RANKS, "")) or 0:
        return Published(
            ranks=min(noted, MOST_RANKS),
            first_rank=_number(annotations.get(names.FIRST_RANK, "")) or 0,
            per_pod=_number(annotations.get(names.RANKS_PER_POD, "")) or 0,
        )
    said = {name: found[1] for name, flag in _VALUES.items() if (found := flag.search(words))}
    index = groups.index_in(pod)
    if "rank" in said or _EXTERNAL.search(words):
        first = _number(said.get("rank", "")) if "rank" in said else index
        return None if first is None else Published(first_rank=first)
    here, everywhere = _number(said.get("here", "")), _number(said.get("all", "1"))
    if "start" in said or _HYBRID.search(words):
        first = _number(said["start"]) if "start" in said else 0
        if here and first is None and index is not None:
            first = index * here  # computed by a shell, from the number in the group
        if not here or first is None:
            return None
        return Published(ranks=min(here, MOST_RANKS), first_rank=first)
    if not everywhere or ("here" in said and here is None):
        return None
    ranks = min(everywhere, MOST_RANKS)
    return Published(ranks=ranks, per_pod=here if here and here < ranks else 0)


def _by_config(config: Object, ranks: Published, sglang_page: int | None) -> Published:
    """Return what the value of --kv-events-config says. Fields that it lacks have vLLM's defaults. SGLang
    publishes when the value names a publisher, without a field that enables it. `sglang_page`: number of
    tokens in a page of SGLang; None for another engine."""
    if sglang_page is None:
        publishes = config.get("enable_kv_cache_events") is True and config.get("publisher", "zmq") == "zmq"
    else:
        publishes = sglang_page >= LEAST_PAGE and config.get("publisher") == "zmq"
    if not publishes:
        return ranks
    endpoint = str(config.get("endpoint") or f"tcp://*:{EVENTS_PORT}")
    port = _listening(endpoint)
    if not port:
        return replace(ranks, elsewhere=endpoint)
    return replace(ranks, port=port, replay_port=_listening(str(config.get("replay_endpoint") or "")))


def _sglang_page(words: str) -> int | None:
    """Return the tokens of a page, if a line of arguments starts SGLang; its default is one token."""
    return int(_after(_PAGE, words) or 1) if _SGLANG.search(words) else None


def _listening(address: str) -> int:
    """Return the port at which an engine listens that was told this address; 0 if it connects there instead.
    (vLLM listens where it is told `*` or `::`.)"""
    _, _, place = address.partition("tcp://")
    host, _, port = place.rpartition(":")
    return port_in(port) if "*" in host or "::" in host else 0


_CONFIG = re.compile(r"--kv[-_]events[-_]config(?:=|\s+)['\"]?(?=\{)")
_DOTTED = re.compile(r"--kv[-_]events[-_]config\.([a-z_]+)(?:=|\s+)['\"]?([^\s'\"]+)")
_VALUES = {
    name: re.compile(rf"(?<![\w-])(?:--data[-_]parallel[-_]{long}|-{short})(?:=|\s+)['\"]?([^\s'\"]+)")
    for name, long, short in (
        ("all", "size", "dp"),
        ("here", "size[-_]local", "dpl"),
        ("start", "start[-_]rank", "dpr"),
        ("rank", "rank", "dpn"),
    )
}
_HYBRID = re.compile(
    r"(?<![\w-])(?:--data[-_]parallel[-_](?:hybrid|multi[-_]port[-_]external)[-_]lb|-dph|-dpm)(?![\w-])"
)
_EXTERNAL = re.compile(r"(?<![\w-])(?:--data[-_]parallel[-_]external[-_]lb|-dpe)(?![\w-])")
_HEADLESS = re.compile(r"(?<![\w-])--headless(?![\w-])")
"""A process that only runs ranks of another pod's server."""
_SGLANG = re.compile(r"(?<![\w-])sglang(?:\.launch_server)?(?![\w./-])")
_PAGE = re.compile(r"--page[-_]size(?:=|\s+)([0-9]{1,6})\b")
LEAST_PAGE = 8
"""Tokens of SGLang's pages from which its KV events are followed; of smaller ones there are too many."""
_json = msgspec.json.Decoder(Object)


def _config(words: str) -> Object | None:
    """Return the value of --kv-events-config in a line of arguments; None without one that can be read."""
    if found := _CONFIG.search(words):
        for text in (words[found.end() :], words[found.end() :].replace("\\", "")):
            end = text.find("}")
            try:
                return _json.decode(text[: end + 1])
            except UNREADABLE:
                continue
        return None
    pairs = dict(_DOTTED.findall(words))
    if not pairs:
        return None
    return {**pairs, "enable_kv_cache_events": pairs.get("enable_kv_cache_events", "").lower() == "true"}


def _after(pattern: re.Pattern[str], words: str) -> str:
    found = pattern.search(words)
    return found[1] if found else ""


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


_VARIABLE = re.compile(r"\$(?:\((\w+)\)|\{(\w+)\}|(\w+))")
MOST_VARIABLES, MOST_VALUE = 64, 16_384
"""Variables that are replaced in one argument, and characters of a value that takes their place."""


def _words(pod: Object) -> Iterator[str]:
    """Yield the arguments of all containers, with the variables of which the pod itself has the value."""
    for container in pod.get("spec", {}).get("containers") or ():
        given = {each.get("name"): str(each.get("value") or "") for each in container.get("env") or ()}
        known = {name: value for name, value in given.items() if 0 < len(value) <= MOST_VALUE}
        for word in (*(container.get("command") or ()), *(container.get("args") or ())):
            yield _VARIABLE.sub(
                lambda found, known=known: known.get(found[found.lastindex], found[0]),  # type: ignore[misc]
                str(word),
                count=MOST_VARIABLES,
            )


def http_ports(pod: Object, selector: Selector) -> tuple[int, ...]:
    """Return the numbers of the ports of a pod's HTTP servers, without names that the pod does not have."""
    containers = pod.get("spec", {}).get("containers") or ()
    named = {
        port.get("name"): int(port.get("containerPort", 0))
        for container in containers
        for port in container.get("ports") or ()
    }
    given = (selector.port, *selector.further_ports)
    found = (port if isinstance(port, int) else named.get(port, 0) for port in given)
    return tuple(port for port in found if port)


def role(pod: Object) -> Role:
    """Return the role that a pod's labels name."""
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    named = labels.get(names.DUTY_LABEL) or labels.get(ROLE_LABEL) or ""
    if named in HELPERS:
        return Role.PREFILL
    return Role.DECODE if named == "decode" else Role.BOTH


def endpoints(
    pod: Object, selector: Selector, hosts: groups.Hosts = groups.NO_HOSTS
) -> tuple[EndpointSpec, ...]:
    """Return the endpoints of a selected pod, one for each HTTP port; none for a pod that has no address, has
    not started, serves nothing, or only helps others without a connector that the gateway speaks to.
    `hosts`: where the pods of engines that span nodes are."""
    meta, there, ports = pod["metadata"], up(pod), http_ports(pod, selector)
    if there is None or not ports or _HEADLESS.search(" ".join(_words(pod))):
        return ()
    host, ready = there
    annotations = meta.get("annotations") or {}
    bootstrap, peer = (
        port_in(annotations.get(names.BOOTSTRAP_PORT, "")),
        port_in(annotations.get(names.PEER_PORT, "")),
    )
    if role(pod) is Role.PREFILL and not bootstrap:
        return ()
    told = published(pod, selector)
    ranks = 1 if len(ports) > 1 else told.ranks  # each rank has a port of its own
    at = groups.of_ranks(pod, ranks, told.per_pod or ranks, hosts)

    def endpoint(i: int, port: int) -> EndpointSpec:
        first = told.first_rank + i
        events = _addresses(at, told.port and told.port + first)
        return EndpointSpec(
            address=f"{host}:{port}",
            node=pod.get("spec", {}).get("nodeName", ""),
            events=events,
            replay=_addresses(at, told.replay_port and told.replay_port + first) if events else (),
            first_rank=first if len(events) > 1 else 0,
            draining=names.DRAINING in annotations,
            ready=ready,
            bootstrap=f"{host}:{bootstrap}" if bootstrap else "",
            role=role(pod),
            peer=f"{host}:{peer + first}" if peer and not bootstrap else "",
            instance=meta.get("uid", ""),
        )

    return tuple(endpoint(i, port) for i, port in enumerate(ports))


def _addresses(hosts: Sequence[str], port: int) -> tuple[str, ...]:
    """Return one address for each rank, by their hosts and the port of the first; none where the ports would
    end above the last one."""
    fits = 0 < port <= 65_536 - len(hosts)
    return tuple(f"tcp://{host}:{port + rank}" for rank, host in enumerate(hosts)) if fits else ()


def told_by(endpoint: EndpointSpec, facts: EngineFacts) -> EndpointSpec:
    """Return an endpoint of whose KV events nothing else is known, with where its engine says that it
    publishes them; as it is if the engine says nothing, or sends them elsewhere."""
    if endpoint.events or not facts.events:
        return endpoint
    host = endpoint.address.rpartition(":")[0]
    events = tuple(listening(host, address) for address in facts.events)
    replay = tuple(listening(host, address) for address in facts.replay)
    if not all(events):
        return endpoint
    return msgspec.structs.replace(
        endpoint,
        events=events,
        replay=replay if all(replay) else (),
        first_rank=min(facts.first_rank, 65_535),
    )


def listening(host: str, address: str) -> str:
    """Return where to connect to a socket of the engine at this host, by its own word (`tcp://*:5557`); empty
    if that is another host's, to which the engine connects itself."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        return ""
    at, _, _ = parts.netloc.rpartition(":")
    listens = parts.scheme == "tcp" and at in ("*", "[::]", "0.0.0.0", host)
    return f"tcp://{host}:{port}" if listens and port else ""


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
            block_size=told.block_size if told.block_size >= LEAST_PAGE else engine.block_size,
            kv_pool_tokens=told.kv_tokens or engine.kv_pool_tokens,
            hashing=msgspec.structs.replace(engine.hashing, algorithm=algorithm),
        ),
    )
    made = msgspec.structs.replace(document, spec=spec)
    check(made)
    return made

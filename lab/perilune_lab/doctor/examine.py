"""Asks one engine everything that the doctor reports. Reads only, and generates nothing unless it may.

Its pages (`perilune_gateway.feeds.engine_words`) → where it publishes KV events, by the pool, by its own
word, or at the usual ports → whether something speaks ZMQ there → its tokens of short conversations of all
kinds. Each question has TIMEOUT_S, and each answer a greatest length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import aiohttp

from perilune_api import pages
from perilune_api.findings import EVENTS_PORT, REPLAY_PORT
from perilune_gateway.feeds import engine_words
from perilune_gateway.feeds.engine_words import Get
from perilune_gateway.feeds.selected_pods import listening
from perilune_gateway.model.engine_facts import EngineFacts
from perilune_gateway.request.tokens.proof import Kind, Post, Told
from perilune_lab.doctor import tokens

TIMEOUT_S = 5.0
GREETING_BYTES, GREETING = 10, (0xFF, 0x7F)
"""How every ZMQ socket begins: ten bytes, of which the first and the last are these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """An engine that is to be examined, and how it is reached."""

    name: str
    get: Get
    post: Post
    host: str
    """Where its sockets are. Empty if they cannot be reached from here."""
    events: Sequence[str] = ()
    """Where it publishes KV events, one address for each rank, as far as the pool knows. Empty if it is
    asked."""
    replay: Sequence[str] = ()
    transfers: bool = False
    """Whether the pool says that it hands KV over."""
    listed: bool = False
    """Whether a pool document lists it, whose gateway follows and uses only what is named there."""

    def known(
        self, events: Sequence[str], replay: Sequence[str], *, transfers: bool, listed: bool = False
    ) -> Patient:
        """Return the same engine with what a pool says of it."""
        return replace(self, events=events, replay=replay, transfers=transfers, listed=listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What was found out of one engine."""

    name: str
    facts: EngineFacts
    events: Sequence[str] = ()
    replay: Sequence[str] = ()
    silent: bool = False
    """Whether nothing speaks ZMQ where its events should come from."""
    tokens: Mapping[Kind, Told] = field(default_factory=dict)
    """What it says about its tokens, for each kind of request; empty if it has no /tokenize."""
    transfers: bool = False


async def examine(patient: Patient, *, generate: bool = False) -> Examined:
    """Ask one engine everything. `generate`: whether it may generate a token where nothing else tells."""
    facts = await engine_words.ask(patient.get)
    events, replay = [*patient.events], [*patient.replay]
    if not events and not patient.listed:
        events, replay = (
            [address for address in (_at(patient.host, a) for a in told) if address]
            for told in (facts.events or (), facts.replay)
        )
        if not events and facts.events is None and patient.host and not facts.trouble:
            events, replay = await _usual(patient.host)
    if facts.trouble:
        return Examined(name=patient.name, facts=facts, events=events, replay=replay)
    model = facts.model
    made, answered = await asyncio.gather(
        tokens.of_engine(patient.post, model.id if model else "", generate=generate),
        asyncio.gather(*(_greets(address) for address in events)) if patient.host else _nothing(),
    )
    return Examined(
        name=patient.name,
        facts=facts,
        events=events,
        replay=replay,
        silent=bool(patient.host and events) and not all(answered),
        tokens=made,
        transfers=patient.transfers or (bool(facts.connector) and not patient.listed),
    )


async def _usual(host: str) -> tuple[list[str], list[str]]:
    """Return where an engine publishes that has no page which says so (older vLLM): the usual ports, if
    ZMQ sockets are there."""
    usual = [f"tcp://{host}:{port}" for port in (EVENTS_PORT, REPLAY_PORT)]
    events, replay = await asyncio.gather(*map(_greets, usual))
    return ([usual[0]], [usual[1]] if replay else []) if events else ([], [])


async def _nothing() -> list[bool]:
    return []


def _at(host: str, address: str) -> str:
    """Where to connect to an engine's socket; its own word where its host is not known, and empty if that is
    another host's."""
    return listening(host, address) if host else listening("*", address)


async def _greets(address: str) -> bool:
    """Whether a ZMQ socket is there."""
    parts = urlsplit(address)
    writer = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            said = await reader.readexactly(GREETING_BYTES)
            return (said[0], said[-1]) == GREETING
    except (OSError, ValueError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.close()


def direct(http: aiohttp.ClientSession, url: str, name: str = "") -> Patient:
    """Return an engine that is reached at its URL."""
    base = url.rstrip("/")

    async def post(path: str, body: bytes, most: int) -> bytes | None:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                http.post(
                    base + path, data=body, headers={"content-type": "application/json"}, **pages.NO_REDIRECTS
                ) as answer,
            ):
                return await pages.read(answer, most)
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    host = urlsplit(base).hostname or ""
    at = f"[{host}]" if ":" in host else host
    get = engine_words.directly(http, base, TIMEOUT_S)
    return Patient(name=name or base, get=get, post=post, host=at)

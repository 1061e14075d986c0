"""Load: plays sessions against an OpenAI-compatible URL and measures every request.

Steps for one turn:

1. wait until it is due (`Mode`), then for a free place (bounded concurrency);
2. build the body from the prompt's segments: text generated from their keys, or in a chat, for answers,
   what the model really said;
3. send it, note the arrival of every chunk, parse afterwards (`streams`);
4. hand over a `Result`. Nothing is retried; an error is a result with its cause.

Cost: one asyncio task per live session or open request; some 25 µs of CPU per chunk on uvloop, most of it
aiohttp's. Not done: non-streamed requests, several answers per request, retries.

Trace seconds become wall seconds by `time_scale` (how many engine seconds one wall second is: 1 on real
hardware) and `speed` (how much faster than recorded the trace is played). Results are wall seconds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from uuid import uuid4

import aiohttp
import msgspec

from perilune_api import names
from perilune_api.foreign_bytes import UNREADABLE
from perilune_lab.load import streams
from perilune_lab.load.bodies import Bodies, Words
from perilune_lab.load.result import Result
from perilune_lab.traces.model import Mode, Session, Style, Turn, submitted_s

ENDPOINT_HEADER = "x-perilune-endpoint"
"""Response header in which a simulated engine names itself; it knows better than the decision which
endpoint served, when Envoy took a fallback."""
SESSION_HEADER = "x-session-id"


RETRIES = 2
"""How often OpenAI's SDKs send a failed request again unless they are told otherwise."""
LONGEST_RETRY_AFTER_S = 60.0
"""They ignore a `Retry-After` beyond this."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Without `Retry-After` they wait for so long, twice as long each time; here without their jitter."""


class TargetError(Exception):
    """The target does not answer, or not like an OpenAI-compatible server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How to play the sessions."""

    target: str
    """`http://host:port`, without `/v1`."""
    model: str
    style: Style = Style.CHAT
    mode: Mode = Mode.THINKTIME
    time_scale: float = 1.0
    speed: float = 1.0
    concurrency: int = 512
    """Most requests open at a time."""
    seconds: float | None = None
    """Wall seconds after which no further turn is submitted; None to play everything."""
    grace_s: float = 30.0
    """Seconds that open requests may take after `seconds` are over; what is still open then is dropped."""
    timeout_s: float = 3600.0
    """Seconds after which a request fails."""
    send_session: bool = True
    """Name the session in a header; otherwise the gateway has to infer it from the prompt."""
    headers: tuple[tuple[str, str], ...] = ()
    """Further request headers."""
    retry: bool = False
    """Send failed requests again as OpenAI's SDKs do, and give up a session after the last attempt.
    Otherwise the session's next turn follows."""


OnResult = Callable[[Result], None]


async def run_load(
    sessions: Iterable[Session],
    load: Load,
    words: Words,
    on_result: OnResult | None = None,
    stop: asyncio.Event | None = None,
) -> list[Result]:
    """Play `sessions` (by start; may be endless if `load.seconds` is set) and return every result in the
    order of their ends. `on_result` sees each as it comes, on the event loop.

    Setting `stop` ends the run as `seconds` does, without grace. Cancelling ends it at once; what was
    measured so far has gone through `on_result`. Turns of one session never overlap, except in
    Mode.TIMESTAMPS. Raises SpecError if that mode meets a turn without a time; nothing for failing requests.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s, sock_connect=10.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as http:
        run = _Run(http, load, words, on_result)
        await run.play(sessions, stop or asyncio.Event())
        return run.results


async def models(target: str) -> list[str]:
    """Return the names of the models that the target serves. Raises TargetError with the cause."""
    url = f"{target}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as http,
            http.get(url) as response,
        ):
            body = await response.read()
            if response.status != 200:
                said = " ".join(body[:200].decode(errors="replace").split())
                raise TargetError(f"{url} answers {response.status}: {said}")
            return [m.id for m in msgspec.json.decode(body, type=_Models).data]
    except (aiohttp.ClientError, TimeoutError, ValueError, *UNREADABLE) as error:
        raise TargetError(f"{url}: {_cause(error)}") from None


class _ModelCard(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_ModelCard, ...] = ()


class _Run:
    """One run's clock, open requests and results."""

    def __init__(
        self, http: aiohttp.ClientSession, load: Load, words: Words, on_result: OnResult | None
    ) -> None:
        self.http = http
        self.load = load
        self.bodies = Bodies(load.model, load.style, words)
        self.on_result = on_result
        self.results: list[Result] = []
        self.places = asyncio.Semaphore(load.concurrency)
        self.closed = False
        """No further turn is submitted."""
        self.open = 0
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()
        self.began = perf_counter()
        self.began_trace_s = 0.0
        """The trace's time when the run began."""
        self.headers = {"content-type": "application/json", names.DECISION_HEADER: "1", **dict(load.headers)}

    def now(self) -> float:
        return perf_counter() - self.began

    async def play(self, sessions: Iterable[Session], stop: asyncio.Event) -> None:
        """Play until all sessions have ended, `load.seconds` and the grace are over, or `stop` is set."""
        played = self._timed if self.load.mode is Mode.TIMESTAMPS else self._sessions
        everything = asyncio.create_task(played(sessions))
        halted = asyncio.create_task(stop.wait())
        try:
            both = (everything, halted)
            await asyncio.wait(both, timeout=self.load.seconds, return_when=asyncio.FIRST_COMPLETED)
            self.closed = True
            if not everything.done() and not halted.done():
                drained = asyncio.create_task(self.idle.wait())
                await asyncio.wait(
                    (drained, halted), timeout=self.load.grace_s, return_when=asyncio.FIRST_COMPLETED
                )
                drained.cancel()
        finally:
            self.closed = True
            halted.cancel()
            if not everything.done():
                everything.cancel()
                await asyncio.wait((everything,))
        if not everything.cancelled():
            everything.result()  # a bug in here travels up

    async def _sessions(self, sessions: Iterable[Session]) -> None:
        """Play a closed loop with a task per session."""
        async with asyncio.TaskGroup() as group:
            for i, session in enumerate(sessions):
                if i == 0:
                    self.began_trace_s = session.start_s
                await self._until(self._wall_s(session.start_s))
                group.create_task(self._session(session))

    async def _session(self, session: Session) -> None:
        due_s = self._wall_s(session.start_s)
        for turn in session.turns:
            if turn.number:
                due_s = self.now() + turn.gap_s / (self.load.time_scale * self.load.speed)
            if self.load.mode is Mode.MAX:
                due_s = max(self.now(), self._wall_s(submitted_s(turn)))
            await self._until(due_s)
            await self.places.acquire()
            result = await self._turn(turn, due_s, session.tenant)
            if self.load.retry and not await self._answered(result, turn, due_s, session.tenant):
                break
        self.bodies.forget(session)

    async def _answered(self, result: Result | None, turn: Turn, due_s: float, tenant: str) -> bool:
        """Send a failed request again, and return whether it was answered at last."""
        for attempt in range(RETRIES):
            if result is None or result.succeeded or not may_retry(result):
                break
            await asyncio.sleep(retry_pause_s(result, attempt))
            await self.places.acquire()
            result = await self._turn(turn, due_s, tenant)
        return result is not None and result.succeeded

    async def _timed(self, sessions: Iterable[Session]) -> None:
        """Open loop: a task per request, submitted in the order of the timestamps."""
        turns = sorted(
            ((submitted_s(turn), i, turn, s.tenant) for i, s in enumerate(sessions) for turn in s.turns),
            key=lambda row: row[:2],
        )
        self.began_trace_s = turns[0][0] if turns else 0.0
        async with asyncio.TaskGroup() as group:
            for at_s, _, turn, tenant in turns:
                due_s = self._wall_s(at_s)
                await self._until(due_s)
                await self.places.acquire()
                group.create_task(self._turn(turn, due_s, tenant))

    def _wall_s(self, trace_s: float) -> float:
        return (trace_s - self.began_trace_s) / (self.load.time_scale * self.load.speed)

    async def _until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - self.now()))  # 0 lets the others run

    async def _turn(self, turn: Turn, due_s: float, tenant: str) -> Result | None:
        """Send one request, if the run is not over. The caller has acquired a place, which this releases."""
        try:
            if self.closed:
                return None
            self.open += 1
            self.idle.clear()
            try:
                result = await self._request(turn, due_s, tenant)
            finally:
                self.open -= 1
                if not self.open:
                    self.idle.set()
        finally:
            self.places.release()
        self.results.append(result)
        if self.on_result is not None:
            self.on_result(result)
        return result

    async def _request(self, turn: Turn, due_s: float, tenant: str) -> Result:
        request_id = uuid4().hex
        headers = {**self.headers, names.REQUEST_ID_HEADER: request_id}
        if self.load.send_session:
            headers[SESSION_HEADER] = turn.session
        if tenant:
            headers["authorization"] = f"Bearer {tenant}"
        body = self.bodies.build(turn)
        submitted_s = self.now()
        result = Result(
            session=turn.session,
            turn=turn.number,
            request_id=request_id,
            submitted_at_s=submitted_s,
            finished_at_s=submitted_s,
            due_at_s=due_s,
            prompt_tokens=turn.prompt_tokens,
        )
        chunks: list[tuple[float, bytes]] = []
        broken = ""
        try:
            url = self.load.target + self.bodies.path
            async with self.http.post(url, data=body, headers=headers) as response:
                endpoint, reason, request_id = _served(response.headers, request_id)
                result = replace(
                    result,
                    status=response.status,
                    accepted_s=self.now() - submitted_s,
                    endpoint=endpoint,
                    reason=reason,
                    request_id=request_id,
                    simulated=ENDPOINT_HEADER in response.headers,
                    retry_after_s=_seconds(response.headers.get("retry-after", "")),
                )
                read, now = response.content.readany, self.now
                while data := await read():
                    chunks.append((now(), data))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            broken = _cause(error)
        result = replace(result, finished_at_s=self.now())
        if result.status != 200:
            said = b"".join(data for _, data in chunks)
            return replace(result, error=broken or _refusal(result.status, said))
        answer = streams.read(chunks)
        self.bodies.answered(turn, answer.text)
        return _measured(result, answer, broken)


def may_retry(result: Result) -> bool:
    """Return whether OpenAI's SDKs would send a request with this result again; they do so after a lost
    connection, too."""
    return result.status in {0, 408, 409, 429} or result.status >= 500


def retry_pause_s(result: Result, attempt: int) -> float:
    """Return the seconds for which they wait before that; `attempt` counts from 0."""
    told_s = result.retry_after_s
    if told_s is not None and 0 < told_s <= LONGEST_RETRY_AFTER_S:
        return told_s
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt)


def _seconds(text: str) -> float | None:
    """Return a number of seconds in a header; None for anything else."""
    return float(text) if text.isdecimal() else None


def _measured(result: Result, answer: streams.Answer, broken: str) -> Result:
    """Add the measurements of an answer with status 200, or the error if it is incomplete."""
    error = broken or answer.error
    if not error and not answer.done:
        error = "the stream ended before [DONE]"
    times = answer.token_times_s
    result = replace(
        result,
        error=error,
        prompt_tokens=result.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=answer.output_tokens,
        counted=answer.prompt_tokens is not None,
    )
    if not times:
        return result
    tokens = max(answer.output_tokens, len(times))
    return replace(
        result,
        ttft_s=times[0] - result.submitted_at_s,
        e2e_s=times[-1] - result.submitted_at_s,
        tpot_s=(times[-1] - times[0]) / (tokens - 1) if tokens > 1 else None,
        itl_s=tuple(b - a for a, b in pairwise(times)),
    )


def _served(headers: Mapping[str, str], request_id: str) -> tuple[str, str, str]:
    """Return (endpoint, reason, request id) of a response; the decision is `<endpoint>; <reason>;
    request=<id>`."""
    parts = [part.strip() for part in headers.get(names.DECISION_HEADER, "").split(";")]
    endpoint, reason, given = (*parts, "", "")[:3]
    return (
        headers.get(ENDPOINT_HEADER, endpoint),
        reason or headers.get(names.REFUSE_REASON_HEADER, ""),
        given.removeprefix("request=") or request_id,
    )


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody | str | None = None
    message: str = ""


def _refusal(status: int, body: bytes) -> str:
    """Return the cause of an answer whose status is not 200, with the server's message if there is one."""
    try:
        answer = msgspec.json.decode(body, type=_ErrorAnswer)
    except UNREADABLE:
        return f"{status}: {body[:200].decode(errors='replace')}".rstrip(": ")
    said = answer.error.message if isinstance(answer.error, _ErrorBody) else answer.error
    return f"{status}: {said or answer.message}".rstrip(": ")


def _cause(error: BaseException) -> str:
    """Return the cause of an exception in one line."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot connect: {os.strerror(number) if number else error.os_error}"
    return str(error) or type(error).__name__

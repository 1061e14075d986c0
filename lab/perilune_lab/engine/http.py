"""vLLM's HTTP surface on aiohttp.

Generating requests: parse → check model and length → open a table (the prompt's block hashes) → submit →
the service writes the stream, or the handler writes the whole answer. A client that leaves cancels its
handler, which aborts the request and frees its blocks. Errors have OpenAI's form.

With several data-parallel ranks, the header `x-data-parallel-rank` names one; otherwise the server takes the
one with the fewest requests, in turns where several have equally few.

A request that names another engine as the target of its transfer is an ordinary one, as with the operator's
door before vLLM.

When the engine core dies, the server lives on for a moment, as vLLM's does: it answers every request with
500 at once, and /health with 503.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from perilune_api import names
from perilune_api.foreign_bytes import UNREADABLE
from perilune_lab.engine.answers import error_body, error_event, form_for
from perilune_lab.engine.faults import Faults
from perilune_lab.engine.hashing import BASE, Namespace
from perilune_lab.engine.inbound import (
    Api,
    BadRequestError,
    Inbound,
    Manners,
    completion_prompt,
    not_the_form,
    parse,
)
from perilune_lab.engine.metrics import Page
from perilune_lab.engine.request import Request
from perilune_lab.engine.service import Answer, CoreDeadError, Service
from perilune_lab.engine.words import key_of

VERSION = "0.32.0"
"""Version of vLLM that this server imitates."""
NAME_HEADER = "x-perilune-endpoint"
"""Response header: the address that answered."""
RANK_HEADER = "x-data-parallel-rank"
MOST_RESPONSES = 10_000
"""Number of stored responses; older ones are forgotten."""
_SERVER_ERROR = (500, "InternalServerError")
_MOST_BODY_BYTES = 64 * 1024 * 1024
_NO_LIMIT = (1 << 31) - 1
"""Most that uvloop takes."""
PUBLIC = frozenset({"/health", "/ping", "/load", "/version", "/metrics", "/fault"})
"""Paths that need no key: vLLM's, and the one by which tests make an engine bad."""
_ID_PREFIX = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETIONS: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "chatcmpl-",
}

_json = msgspec.json.Encoder().encode
_T = TypeVar("_T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the server reports about itself."""

    model: str
    max_model_len: int
    adapters: Mapping[str, Namespace]
    """LoRA adapters by the name that requests use."""
    aliases: Sequence[str] = ()
    """Further names of the model, for requests and /v1/models."""
    strict_openai: bool = False
    """See `inbound.Manners`."""
    api_keys: Sequence[str] = ()
    """One of them is demanded of all requests but those for PUBLIC; without keys nothing is demanded."""
    store_responses: bool = False
    """Keep responses, so that others can name them as `previous_response_id`."""


class _ResponseSink:
    """A streamed response as a `Sink`."""

    __slots__ = ("_response", "_transport")

    def __init__(self, response: web.StreamResponse, transport: asyncio.Transport | None) -> None:
        self._response = response
        self._transport = transport
        if transport is not None:
            # Above the limit `write` waits for the client. The engine's one writer must not, however much an
            # answer has grown since it was written to last.
            transport.set_write_buffer_limits(high=_NO_LIMIT)

    async def write(self, data: bytes) -> None:
        await self._response.write(data)

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0


class Server:
    def __init__(
        self, ranks: Sequence[Service], served: Served, clear_store: Callable[[], None] | None = None
    ) -> None:
        """`ranks`: one service for each data-parallel rank."""
        self._ranks = ranks
        self._text = ranks[0].text
        self._served = served
        self._clear_store = clear_store
        self._turn = 0
        self._responses: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._manners = Manners(served.strict_openai, self._responses)
        self.on_core_dead: Callable[[], None] = lambda: None
        """Is called when a request fails because the engine core has died."""
        self.address = ""
        """`ip:port`, set once it listens."""

    def app(self) -> web.Application:
        faults = Faults([service.scheduler for service in self._ranks])
        middlewares = (_demand_key(self._served.api_keys), _answer_errors(self), faults.middleware())
        app = web.Application(middlewares=middlewares, client_max_size=_MOST_BODY_BYTES)
        app.router.add_post("/fault", faults.put)
        app.router.add_get("/fault", faults.get)
        for api in Api:
            app.router.add_post(api, self._generate_handler(api))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/ping", self._ok)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/load", self._load)
        app.router.add_get("/kv_event_sources", self._sources)
        return app

    def metrics_app(self) -> web.Application:
        """Return the page of metrics alone, for a port of its own."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        return app

    # generation

    def _generate_handler(self, api: Api) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await self._generate(api, request)

        return handler

    async def _generate(self, api: Api, http: web.Request) -> web.StreamResponse:
        arrived_s = self._ranks[0].now()
        inbound = parse(api, await http.read(), self._text, self._manners)
        namespace = self._namespace(inbound)
        service = self._choose(http.headers.get(RANK_HEADER, ""))
        if service.metrics.asleep:  # vLLM's would compute with memory that it does not have
            return web.Response(status=503, text="the engine sleeps")
        n_tokens, natural = self._output_tokens(inbound)
        given = _header_safe(http.headers.get("x-request-id") or inbound.request_id) or uuid.uuid4().hex
        answer_id = _ID_PREFIX[api] + given
        if api is Api.RESPONSES and inbound.request_id:
            answer_id = _header_safe(inbound.request_id)
        session = _header_safe(http.headers.get("x-session-id") or inbound.session_id)
        me = self.address
        table = service.scheduler.cache.open(inbound.prompt[:], namespace, session)
        request = Request(
            given,
            table,
            service.text.answer(inbound.prompt, n_tokens),
            natural_end=natural,
            priority=inbound.priority,
            report_full=inbound.report_full,
            leg=inbound.leg if http.headers.get(names.TRANSFER_TARGET_HEADER, me) == me else None,
        )
        headers = {NAME_HEADER: self.address, "x-request-id": given}
        form = form_for(inbound, answer_id)
        done = asyncio.get_running_loop().create_future()
        if not inbound.stream:
            answer = Answer(request, form, None, done)
            await self._answered(service, answer, arrived_s)
            text = service.text.decode(request.output)
            self._keep(inbound, answer_id, text)
            body = form.whole(text, request.output, answer.usage(), str(request.finish))
            return web.Response(body=body, content_type="application/json", headers=headers)
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        response.enable_chunked_encoding()
        await response.prepare(http)
        first = form.begin()
        if first:
            await response.write(first)
        sink = _ResponseSink(response, http.transport)
        try:
            rest = await self._answered(service, Answer(request, form, sink, done), arrived_s)
        except CoreDeadError as error:
            rest = error_event(api, str(error), *_SERVER_ERROR)
            self.on_core_dead()
        else:
            self._keep(inbound, answer_id, service.text.decode(request.output))
        await response.write_eof(rest)
        return response

    def _choose(self, wanted: str) -> Service:
        """Return the service that takes a request; `wanted` is the header's value. Raises BadRequestError."""
        count = len(self._ranks)
        if wanted.lstrip("+-").isdecimal():  # vLLM ignores other texts
            if 0 <= int(wanted) < count:
                return self._ranks[int(wanted)]
            raise BadRequestError(f"data_parallel_rank {int(wanted)} is out of range [0, {count}).")
        self._turn += 1
        in_turn = [self._ranks[(self._turn - 1 + i) % count] for i in range(count)]
        return min(in_turn, key=lambda service: service.open_requests)

    async def _answered(self, service: Service, answer: Answer, arrived_s: float) -> bytes:
        """Wait until the answer is complete (see `Answer.done`); abort the request if the handler is
        cancelled because the client has left. Raises CoreDeadError."""
        service.submit(answer, arrived_s)
        try:
            return await answer.done
        finally:
            service.abort(answer.request)

    def _keep(self, inbound: Inbound, answer_id: str, text: str) -> None:
        """Store a response for those that continue it."""
        if not (inbound.store and self._served.store_responses):
            return
        self._responses[answer_id] = [*inbound.conversation, {"role": "assistant", "content": text}]
        if len(self._responses) > MOST_RESPONSES:
            del self._responses[next(iter(self._responses))]

    def _namespace(self, inbound: Inbound) -> Namespace:
        served = self._served
        adapter = served.adapters.get(inbound.model)
        if adapter is None and inbound.model not in ("", served.model, *served.aliases):  # as vLLM
            message = f"The model `{inbound.model}` does not exist."
            raise BadRequestError(message, 404, "NotFoundError", "model")
        if not inbound.cache_salt:
            return adapter or BASE
        base = adapter or BASE
        return Namespace(inbound.cache_salt, base.lora_name, base.lora_path, base.lora_id)

    def _output_tokens(self, inbound: Inbound) -> tuple[int, bool]:
        """Return the length of the answer in tokens, and whether the model ends it by itself. Raises
        BadRequestError."""
        room, prompt = self._served.max_model_len, len(inbound.prompt)
        if prompt >= room:
            self._ranks[0].metrics.rejections += 1
            raise BadRequestError(
                f"This model's maximum context length is {room} tokens. However, your request has {prompt}"
                " input tokens. Please reduce the length of the input messages.",
                param="input_tokens",
            )
        wanted = inbound.max_tokens
        if wanted is not None and wanted < 1:
            raise BadRequestError(f"max_tokens must be at least 1, got {wanted}.", param="max_tokens")
        if wanted is not None and prompt + wanted > room:
            raise BadRequestError(
                f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum"
                f" context length is {room} tokens and your request has {prompt} input tokens"
                f" ({wanted} > {room} - {prompt}).",
                param="max_tokens",
            )
        if wanted is not None:
            return wanted, False
        if inbound.ignore_eos:
            return room - prompt, False
        natural = 16 + key_of(inbound.prompt) % 113
        return min(natural, room - prompt), natural <= room - prompt

    # the rest

    async def _tokenize(self, http: web.Request) -> web.Response:
        fields = _decode(await http.read(), _Tokenize)
        text, special = self._text, fields.add_special_tokens
        try:
            if fields.messages is not None:
                tokens = text.chat(fields.messages, fields.tools or (), bool(special))
            else:
                tokens = completion_prompt(fields.prompt, text, special is not False)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequestError(not_the_form(error)) from None
        answer = {
            "count": len(tokens),
            "max_model_len": self._served.max_model_len,
            "tokens": tokens,
            "token_strs": text.pieces(tokens) if fields.return_token_strs else None,
        }
        return _answer(answer)

    async def _detokenize(self, http: web.Request) -> web.Response:
        fields = _decode(await http.read(), _Detokenize)
        try:
            return _answer({"prompt": self._text.decode(fields.tokens)})
        except (IndexError, OverflowError, ValueError):
            raise BadRequestError("a token id is not in the vocabulary", param="tokens") from None

    async def _count_tokens(self, http: web.Request) -> web.Response:
        inbound = parse(Api.MESSAGES, await http.read(), self._text)
        return _answer({"input_tokens": len(inbound.prompt)})

    async def _reset(self, http: web.Request) -> web.Response:
        done = [service.reset_prefix_cache() for service in self._ranks]
        if http.query.get("reset_external", "").lower() == "true" and self._clear_store is not None:
            self._clear_store()
        return web.Response(status=200 if all(done) else 409)

    async def _sleep(self, _: web.Request) -> web.Response:
        """Forget all KV, and serve nothing until `/wake_up`. As vLLM, do not look whether requests run."""
        for service in self._ranks:
            service.sleep()
        return web.Response()

    async def _wake_up(self, _: web.Request) -> web.Response:
        for service in self._ranks:
            service.metrics.asleep = False
        return web.Response()

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return _answer({"is_sleeping": any(service.metrics.asleep for service in self._ranks)})

    async def _models(self, _: web.Request) -> web.Response:
        served = self._served
        card = {
            "id": served.model,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": served.model,
            "parent": None,
            "max_model_len": served.max_model_len,
        }
        adapters = [
            {**card, "id": name, "root": space.lora_path, "parent": served.model, "max_model_len": None}
            for name, space in served.adapters.items()
        ]
        named = [{**card, "id": name} for name in (served.model, *served.aliases)]
        return _answer({"object": "list", "data": [*named, *adapters]})

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if any(service.dead for service in self._ranks) else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _answer({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        page = Page()
        for service in self._ranks:
            service.metrics.write(page, service.scheduler)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=page.text().encode(), headers={"content-type": kind})

    async def _load(self, _: web.Request) -> web.Response:
        return _answer({"server_load": sum(service.open_requests for service in self._ranks)})

    async def _sources(self, _: web.Request) -> web.Response:
        sources = {
            str(publisher.rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": publisher.events,
                "replay_endpoint": publisher.replay,
                "topic": publisher.topic,
                "buffer_steps": publisher.buffer_steps,
                "hwm": publisher.high_water_mark,
            }
            for service in self._ranks
            if (publisher := service.publisher)
        }
        return _answer(sources)

    def error(self, message: str, status: int, kind: str, param: str | None) -> web.Response:
        body = error_body(message, status, kind, param)
        headers = {NAME_HEADER: self.address}
        return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _demand_key(keys: Sequence[str]) -> Middleware:
    """Answer requests without one of the keys as vLLM does."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if keys and request.path not in PUBLIC and not (scheme.lower() == "bearer" and given in keys):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return middleware


def _answer_errors(server: Server) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequestError as error:
            return server.error(str(error), error.status, error.kind, error.param)
        except ConnectionResetError:  # the client has left before the head of the answer
            return web.Response()
        except CoreDeadError as error:
            server.on_core_dead()
            return server.error(str(error), *_SERVER_ERROR, None)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return server.error(error.reason, error.status, error.reason.replace(" ", "") + "Error", None)

    return middleware


class _Tokenize(msgspec.Struct):
    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class _Detokenize(msgspec.Struct):
    tokens: Sequence[int]


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise BadRequestError(str(error)) from None


def _answer(value: object) -> web.Response:
    return web.Response(body=_json(value), content_type="application/json")


def _header_safe(name: str) -> str:
    """Return a name from a client, made fit for headers and events: bytes that are not UTF-8 become `?`."""
    return name.encode("ascii", "replace").decode()

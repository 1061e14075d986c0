"""The pools behind one route: which of them serves a request, and what none of them has to be asked.

    on_headers ─┬─▶ Chosen      the session is bound in one pool, which decides by the headers
                ├─▶ Answer      /v1/models: the models of all pools
                └─▶ NeedBody ──▶ on_body ─┬─▶ Chosen    a pool that serves the body's model
                                          └─▶ Refusal   no pool does

Every request comes to `Pools` first. `Chosen` names the router of its pool, which goes on with the request to
its end. A gateway of one pool is a list of one: then every request is that pool's, and nothing is looked up.

Where several pools serve a model of the same name, the one that has the session, or the response that the
request continues, keeps it. A new session goes to the pool with the highest of the scores of weighted
rendezvous hashing, -weight / ln(u), where u in (0, 1) is a hash of session and pool (Wang and Ravishankar
1998; Schindelhauer and Schomaker 2005). So each pool gets its weight's share, all replicas of the gateway
agree without a word, and a changed weight moves as few names as possible. A request without a session is
named by how its conversation begins.

Costs a look-up of the session in each pool, and for a model of several pools one hash for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model import (
    NEED_BODY,
    Answer,
    NeedBody,
    Refusal,
    RequestHead,
    Routed,
)
from perilune_gateway.request import openai, paths
from perilune_gateway.request.known_bodies import KnownBodies
from perilune_gateway.request.parsed import ParsedRequest, opening
from perilune_gateway.routing import admission
from perilune_gateway.routing.context import StepTimer
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.router import Encode, Router
from perilune_gateway.state import resets


class Chosen(Struct, frozen=True, gc=False):
    """The pool of a request, by its router, and what that router said of the request."""

    router: Router
    verdict: Routed | Refusal | Encode | Queued


class Pools:
    """Chooses among the pools of one gateway."""

    def __init__(
        self,
        routers: Sequence[Router],
        on_refused: Callable[[Refusal], None],
        *,
        stopwatch: Callable[[], float],
        since: int = 0,
        more: bool = False,
    ) -> None:
        """`on_refused` is told of each refusal that is of no pool. `since`: what /v1/models gives as the time
        at which the models came into being, in Unix seconds. `more`: whether further pools are awaited."""
        self.serve(routers, more=more)
        self.bodies = KnownBodies()
        self._on_refused = on_refused
        self._stopwatch = stopwatch
        self._since = since

    def serve(self, routers: Sequence[Router], *, more: bool) -> None:
        """Choose among these pools from now on. Requests that are with another one stay there."""
        self.routers = tuple(routers)
        self._only = self.routers[0] if len(self.routers) == 1 and not more else None
        """The pool of every request, if there is no other one."""

    def on_headers(self, head: RequestHead) -> Chosen | Refusal | Answer | NeedBody:
        """Choose by the headers, if they suffice."""
        if self._only:
            decided = self._only.on_headers(head)
            return decided if isinstance(decided, NeedBody) else Chosen(self._only, decided)
        self.routers[0].arrived(head)
        if refusal := self.routers[0].unsupported(head):
            return self.refused(head, refusal)
        response_id = paths.response_of(head.path)
        if head.method == "POST" and head.has_body and not response_id:
            bound = [router for router in self.routers if router.is_bound(router.identity(head))]
            if len(bound) == 1 and paths.is_model_path(head.path) and _of_one_model(bound[0]):
                verdict = bound[0].on_headers(head)
                return NEED_BODY if isinstance(verdict, NeedBody) else Chosen(bound[0], verdict)
            return NEED_BODY
        if head.method == "GET" and (model := paths.listed(head.path)) is not None:
            return self._listed(head, model)
        stores = (router for router in self.routers if router.stores(router.identity(head), response_id))
        return self._by_headers(next(stores, self.routers[0]), head)

    def on_body(self, head: RequestHead, body: bytes) -> Chosen | Refusal:
        """Choose by the body's model."""
        if self._only:
            return Chosen(self._only, self._only.on_body(head, body))
        timer = StepTimer(self._stopwatch)
        if not paths.is_model_path(head.path):
            return self._elsewhere(head, openai.model_in(body))
        head.name = resets.named(body)
        request = self.bodies.parse(head.path, body)
        if isinstance(request, Refusal):
            return self.refused(head, request)
        if not request.model and len(self._names()) > 1:
            return self.refused(head, admission.no_model(self._names(), "This gateway"))
        if not request.model:
            request = replace(request, model=self.routers[0].pool.spec.model.name)
        serving = [router for router in self.routers if request.model in router.models]
        if not serving:
            return self.refused(head, self._unknown(request.model))
        try:
            router = serving[0] if len(serving) == 1 else _of_session(serving, head, request)
        except UNREADABLE as error:
            return self.refused(head, openai.unreadable(error))
        head.identity = None  # pools may find tenant and session in different headers
        return Chosen(router, router.on_request(head, request, len(body), timer))

    def refused(self, head: RequestHead, refusal: Refusal) -> Refusal:
        """Record a refusal that no router has made."""
        if self._only:
            self._only.refused(head, refusal)
        else:
            self._on_refused(refusal)
        return refusal

    def _by_headers(self, router: Router, head: RequestHead) -> Chosen:
        verdict = router.on_headers(head)
        assert not isinstance(verdict, NeedBody), "only requests for the model wait for their body"
        return Chosen(router, verdict)

    def _elsewhere(self, head: RequestHead, model: str) -> Chosen | Refusal:
        """Choose for a request with a body for another page than the model's, such as /tokenize or
        /v1/embeddings."""
        if not model and len(self._names()) > 1:
            return self.refused(head, admission.no_model(self._names(), "This gateway"))
        router = next((r for r in self.routers if not model or model in r.models), None)
        return (
            Chosen(router, router.to_any_endpoint(head))
            if router
            else self.refused(head, self._unknown(model))
        )

    def _unknown(self, model: str) -> Refusal:
        return admission.unknown_model(model, self._names(), "This gateway")

    def _names(self) -> set[str]:
        return {name for router in self.routers for name in router.models}

    def _listed(self, head: RequestHead, model: str) -> Answer | Refusal:
        """Return the page /v1/models, or the entry of one model."""
        entries = {entry["id"]: entry for router in self.routers for entry in _entries(router, self._since)}
        if not model:
            return Answer(msgspec.json.encode({"object": "list", "data": list(entries.values())}))
        if model not in entries:
            return self.refused(head, self._unknown(model))
        return Answer(msgspec.json.encode(entries[model]))


def _of_one_model(router: Router) -> bool:
    return not router.pool.spec.routing.session.several_models


def _of_session(serving: Sequence[Router], head: RequestHead, request: ParsedRequest) -> Router:
    """Return the pool that has the session, of those that serve the model; else the one that the weights
    choose. Raises one of UNREADABLE for messages that cannot be read."""
    for router in serving:
        identity = router.identity(head, request)
        if router.is_bound(identity) or router.stores(identity, request.previous_response_id):
            return router
    identity = serving[0].identity(head, request)
    session = (identity.parent_id or identity.session_id).encode(errors="surrogatepass")
    name = identity.tenant.encode(errors="surrogatepass") + b"\0" + (session or opening(request))
    weights = {_name(router): router.pool.spec.routing.weight for router in serving}
    chosen = by_weight(weights, name)
    return next(router for router in serving if _name(router) == chosen)


def by_weight(weights: Mapping[str, int], name: bytes) -> str:
    """Return the pool of a session, by weighted rendezvous hashing. If no pool has a weight, all have the
    same."""
    if not any(weights.values()):
        weights = dict.fromkeys(weights, 1)

    def score(pool: str) -> float:
        u = ((xxh3_64_intdigest(name, xxh3_64_intdigest(pool.encode())) >> 12) + 0.5) / 2**52
        return -weights[pool] / log(u)

    return max(sorted(weights), key=score)


def _name(router: Router) -> str:
    return f"{router.pool.metadata.namespace}/{router.pool.metadata.name}"


def _entries(router: Router, since: int) -> Iterator[dict[str, Any]]:
    """Yield a pool's entries of /v1/models, in OpenAI's form with vLLM's additions."""
    model = router.pool.spec.model
    context = {"max_model_len": model.context_tokens} if model.context_tokens else {}
    base = {"object": "model", "created": since, "owned_by": "perilune"}
    for name in (model.name, *model.aliases):
        yield {"id": name, **base, "root": model.name, "parent": None, **context}
    for lora in model.loras:
        yield {"id": lora.name, **base, "root": lora.name, "parent": model.name, **context}

"""`spec.routing`: how the gateway chooses the endpoint of a request."""

from math import ceil
from typing import Annotated, Literal

from msgspec import Meta

from perilune_api.fields import Struct
from perilune_api.policies import PolicyChoice
from perilune_api.pool.migration import Migration
from perilune_api.pool.refusals import Ejection, Limits
from perilune_api.pool.sessions import SessionAdmission, SessionKeys
from perilune_api.pool.transfers import Disaggregation, Pull
from perilune_api.pool.trying import Canary, Shadow

DECISION_S = 2
"""Seconds for which Envoy waits for a decision of the gateway."""


class EnginePriority(Struct, frozen=True):
    """The order in which an engine serves its waiting requests: first come, first served, unless a field says
    otherwise. Then the engines run with `--scheduling-policy priority` and the gateway writes `priority` into
    every request body, so it waits for every body before it decides."""

    ageing_weight: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Ranks a request as if it had arrived this many seconds later for each second of uncached prefill that
    it needs, so that short prompts overtake long ones. With 0 its length does not count."""
    fair_share: bool = False
    """Ranks a request as if it had arrived later by the time that its tenant's queued prefill takes at the
    tenant's share of the pool, so that tenants with little in the queues overtake those with much. Tenants
    that are alone are served as before. Name the tenants with `session.tenantHeader` where clients could
    otherwise pass for several."""

    @property
    def used(self) -> bool:
        """Whether requests are ranked at all."""
        return self.fair_share or self.ageing_weight > 0


class Routing(Struct, frozen=True, kw_only=True):
    """How the gateway chooses the endpoint of a request: policy, sessions, migration, admission."""

    policy: PolicyChoice = PolicyChoice()
    shadow: Shadow = Shadow()
    canary: Canary | None = None
    migration: Migration = Migration()
    engine_priority: EnginePriority = EnginePriority()
    disaggregation: Disaggregation = Disaggregation()
    pull: Pull = Pull()
    decision_header: Literal["name", "address", "off"] = "name"
    """What a client learns that asks with the header names.DECISION_HEADER: the endpoint, the reason and the
    request id, and the endpoint that answered if it is another one. name: endpoints as names that tell
    nothing of their addresses. address: their addresses, for pools that only trusted clients use. off:
    nothing."""
    cache_salt: Literal["client", "tenant"] = "client"
    """What keeps equal prompts apart in the engines' KV caches. client: the body's `cache_salt`, if any.
    tenant: a salt that the gateway derives from the tenant and the body's `cache_salt`, so that no tenant
    uses or notices what another one has cached. The gateway then writes into every request body, so it waits
    for every body before it decides."""
    allow_policy_header: bool = False
    """Whether a request may choose its policy with the header names.POLICY_HEADER."""
    session: SessionKeys = SessionKeys()
    limits: Limits = Limits()
    ejection: Ejection = Ejection()
    session_admission: SessionAdmission = SessionAdmission()
    weight: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    """Where several pools behind one gateway serve a model of the same name: this pool's share of that name's
    new sessions, relative to the weights of the others. A session stays with its pool. With 0 it gets no new
    sessions, unless all have 0."""
    fallbacks: Annotated[int, Meta(ge=0, le=8)] = 2
    """Number of further endpoints that the gateway gives to Envoy, which passes over those that it does not
    know. If the one that it chose fails before it answers, it tries one more."""

    @property
    def message_timeout_s(self) -> int:
        """Seconds for which Envoy waits for an answer of the gateway: for a decision, and before that for a
        new session to begin, if new sessions wait."""
        admission = self.session_admission
        return DECISION_S + (ceil(admission.max_wait_seconds) if admission.enabled else 0)

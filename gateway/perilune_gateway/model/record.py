"""The record of a decision: its inputs, its result, and how the request ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from xxhash import xxh3_64_hexdigest

from perilune_gateway.model.decision import Cost, Decision, Outcome, Refusal
from perilune_gateway.model.endpoint import Candidate
from perilune_gateway.model.request import Phase, RequestView, TokenSource, Unpulled, Unsplit
from perilune_gateway.model.tracing import Trace


class Ending(Struct, frozen=True, gc=False, kw_only=True):
    """How a request ended."""

    outcome: Outcome
    duration_s: float
    """Seconds from the decision to the end of the answer."""
    served: str = ""
    """Address of the endpoint that answered, as Envoy reports it; a fallback if it is not the target."""
    status: int = 0
    """HTTP status of the answer; 0 if there was no answer."""
    cached_tokens: int | None = None
    """Number of prompt tokens served from the prefix cache, as the engine reports it; None if not
    reported."""
    output_tokens: int = 0
    """Number of tokens of the answer, as the engine reports it; 0 if not reported."""
    answered_s: float | None = None
    """Seconds from the decision to the head of the answer; None if there was no answer."""
    prefilled_s: float | None = None
    """Seconds from the decision to the end of the prefill, as the engine's KV events tell; None if they did
    not."""


class DecisionRecord(Struct, frozen=True, gc=False, kw_only=True):
    """One decision with all of its inputs."""

    view: RequestView
    verdict: Decision | Refusal
    policy: str
    """Name of the policy that decided; empty if no policy was called (pass-through, early refusals)."""
    candidates: Sequence[Candidate] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Endpoints that were no candidates: address → name of the check that failed."""
    destinations: tuple[str, ...] = ()
    """Addresses given to Envoy: the target, then the fallbacks."""
    cached_tokens: int = 0
    """Number of prompt tokens predicted to be cached at the target."""
    timings_us: Mapping[str, float] = field(default_factory=dict)
    """Microseconds of each `Step`."""
    time: float = 0.0
    """Time of the decision in Unix seconds."""
    tenant: str = ""
    """Tenant as `Identity` has it; outputs show only its `tenant_hash`."""
    ending: Ending | None = None
    """None while the request runs."""
    seed: int = 0
    """Seed of the random generator that the policy used: `random.Random(seed)`."""
    queued_s: float = 0.0
    """Seconds for which the session, which is new, waited to begin."""
    trace: Trace | None = None
    """The request's span; None without tracing."""
    canary: bool = False
    """Whether the policy is that of `routing.canary`, with the parameters there."""

    @property
    def request_id(self) -> str:
        return self.view.request_id

    @property
    def session_id(self) -> str:
        return self.view.session.session_id if self.view.session else ""

    @property
    def model(self) -> str:
        return self.view.model

    @property
    def phase(self) -> Phase:
        return self.view.phase

    @property
    def prompt_tokens(self) -> int:
        return self.view.prompt_tokens

    @property
    def token_source(self) -> TokenSource:
        return self.view.token_source

    @property
    def target(self) -> str:
        """Address of the chosen endpoint; empty for a refusal."""
        return self.verdict.target if isinstance(self.verdict, Decision) else ""

    @property
    def reason(self) -> str:
        """Value of the `Reason` or `RefuseReason`."""
        return self.verdict.reason.value

    @property
    def costs(self) -> Sequence[Cost]:
        return self.verdict.costs if isinstance(self.verdict, Decision) else ()

    @property
    def moved_from(self) -> str:
        return self.verdict.moved_from if isinstance(self.verdict, Decision) else ""

    @property
    def prefill(self) -> str:
        """Address of the endpoint that prefills for the target; empty if the target does."""
        return self.verdict.prefill if isinstance(self.verdict, Decision) else ""

    @property
    def prefill_costs(self) -> Sequence[Cost]:
        """Seconds that the prompt's prefill costs where, see `Decision`."""
        return self.verdict.prefill_costs if isinstance(self.verdict, Decision) else ()

    @property
    def unsplit(self) -> Unsplit | None:
        """Why the target prefills itself, in a pool with prefill endpoints."""
        return self.verdict.unsplit if isinstance(self.verdict, Decision) else None

    @property
    def pulled_from(self) -> str:
        """Address of the endpoint that the target fetches KV from; empty if it fetches none."""
        return self.verdict.replicate_from if isinstance(self.verdict, Decision) else ""

    @property
    def unpulled(self) -> Unpulled | None:
        """Why the target computes what another endpoint caches."""
        return self.verdict.unpulled if isinstance(self.verdict, Decision) else None

    @property
    def chosen(self) -> Candidate | None:
        """The chosen candidate; None for a refusal, or if the target was no candidate."""
        return next((c for c in self.candidates if c.address == self.target), None)

    @property
    def hit_ratio(self) -> float:
        """Predicted share of the prompt that is cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def tenant_hash(tenant: str) -> str:
    """Return a short hash that identifies the tenant without revealing its name; empty for no tenant."""
    return xxh3_64_hexdigest(tenant.encode(errors="surrogatepass"))[:12] if tenant else ""

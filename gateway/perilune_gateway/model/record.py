"""One decision with everything that it was taken from, and how its request ended. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from xxhash import xxh3_64_hexdigest

from perilune_gateway.model.decision import Cost, Decision, Outcome, Refusal
from perilune_gateway.model.endpoint import Candidate
from perilune_gateway.model.request import Phase, RequestView, TokenSource


class Ending(Struct, frozen=True, gc=False):
    """How a request ended."""

    outcome: Outcome
    duration_s: float
    """From the decision to the end of the answer."""
    served: str = ""
    """The endpoint that answered, as Envoy says; a fallback, if it is not the target."""
    status: int = 0
    """HTTP status of the answer; 0: none came."""
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache, as the engine says; None: it did not say."""


class DecisionRecord(Struct, frozen=True, gc=False):
    """One decision with everything that it was taken from."""

    view: RequestView
    verdict: Decision | Refusal
    policy: str
    """Name of the policy that decided; empty where none was asked (pass-through, early refusals)."""
    candidates: Sequence[Candidate] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Endpoints that were no candidates: address → name of the check that failed."""
    destinations: tuple[str, ...] = ()
    """What Envoy was told: the target, then fallbacks."""
    cached_tokens: int = 0
    """Prompt tokens predicted to be cached at the target."""
    timings_us: Mapping[str, float] = field(default_factory=dict)
    """Microseconds by step (metrics.Step)."""
    time: float = 0.0
    """Unix seconds."""
    tenant: str = ""
    """As `identity` knows it; what is rendered is `tenant_hash` of it."""
    ending: Ending | None = None
    """None while the request runs."""
    seed: int = 0
    """The policy's random draws follow from `random.Random(seed)`."""

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
        """Empty for a refusal."""
        return self.verdict.target if isinstance(self.verdict, Decision) else ""

    @property
    def reason(self) -> str:
        """Value of a Reason or a RefuseReason."""
        return self.verdict.reason.value

    @property
    def costs(self) -> Sequence[Cost]:
        return self.verdict.costs if isinstance(self.verdict, Decision) else ()

    @property
    def moved_from(self) -> str:
        return self.verdict.moved_from if isinstance(self.verdict, Decision) else ""

    @property
    def chosen(self) -> Candidate | None:
        """The target's row; None for a refusal, or a target that was no candidate."""
        return next((c for c in self.candidates if c.address == self.target), None)

    @property
    def hit_ratio(self) -> float:
        """Predicted cached tokens / prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def tenant_hash(tenant: str) -> str:
    """Tells tenants apart without naming them; empty for no tenant."""
    return xxh3_64_hexdigest(tenant.encode(errors="surrogatepass"))[:12] if tenant else ""

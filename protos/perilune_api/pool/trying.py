"""`spec.routing.shadow` and `.canary`: other policies on the pool's own traffic, without and with effect."""

from typing import Annotated, Literal

from msgspec import Meta

from perilune_api.fields import Struct
from perilune_api.policies import PolicyChoice

PolicyNamed = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,62}$")]


class Shadow(Struct, frozen=True):
    """Other policies that judge the gateway's decisions, in a process of their own. They change nothing."""

    policies: Annotated[tuple[PolicyNamed, ...], Meta(max_length=8)] = ()
    """Names of the policies, with the parameters of routing.policy. Without any nothing is judged."""
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the decisions that are judged."""
    cpu: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """CPU cores that judging may take in each gateway, on average. Decisions beyond it are not judged, and
    are counted."""


class Canary(Struct, frozen=True, kw_only=True):
    """Another policy that decides for a share of the sessions, until it is promoted or rolled back. It is
    promoted as soon as first tokens, output tokens and failures are shown to be no worse than by `tolerance`,
    and rolled back as soon as one of them is shown to be worse."""

    policy: PolicyChoice
    """The policy, with parameters of its own; as routing.policy."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Share of the sessions that it decides for. A change moves only as many sessions to the other policy as
    it must, and begins the comparison again."""
    by: Literal["session"] = "session"
    """What is divided. A request without a session counts as a session of its own."""
    tolerance: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """By how much more time a policy that is promoted may take, as a share: for first tokens, and for each
    output token. Of failed requests it may have a tenth of this share more."""

"""The policies that a simulation plays: those of the gateway, and two that only a simulation can carry out.

SPLIT names these two with the reason. Both prefill on one endpoint and decode on another, and an external
processor cannot send the prefill's part of a request.
"""

from collections.abc import Mapping

from perilune_gateway import policy
from perilune_gateway.policy import Policy, with_block, without_block
from perilune_research.simulator.policies.dynamo_disagg import dynamo_disagg
from perilune_research.simulator.policies.static_pd import static_pd

SPLIT: Mapping[str, str] = {
    "dynamo_disagg": "it puts prefills into a queue of their own",
    "static_pd": "it prefills on one endpoint and decodes on another",
}
POLICIES: Mapping[str, Policy] = dict(
    sorted(
        {
            **policy.POLICIES,
            "dynamo_disagg": with_block(dynamo_disagg, lambda params: params.dynamo),
            "static_pd": without_block(static_pd),
        }.items()
    )
)

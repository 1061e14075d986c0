"""Why a request went where it went: one record per decision, kept for a while, explained when read.

    recording ──add──▶ Decisions ──get, query──▶ DecisionRecord ─┬─▶ sentence
                                                                 ├─▶ summary, to_json ─▶ admin, CLI
                                                                 └─▶ counterfactual

Every decision and refusal makes one `DecisionRecord`, the very values that the policy saw (record.py), in a
bounded ring (decisions.py). All else is made from it when somebody asks: a sentence (words.py), JSON
(page.py), what could be expected of an endpoint (expectation.py), and what the other policies would have done
(other_policies.py). Does not: write (decision_log does), count (metrics.py does), know where values come
from.
"""

from perilune_gateway.model import DecisionRecord, Ending, tenant_hash
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.explain.expectation import Expected, expected
from perilune_gateway.observe.explain.other_policies import counterfactual
from perilune_gateway.observe.explain.page import summary, to_json
from perilune_gateway.observe.explain.words import BECAUSE, sentence

__all__ = [
    "BECAUSE",
    "DecisionRecord",
    "Decisions",
    "Ending",
    "Expected",
    "counterfactual",
    "expected",
    "sentence",
    "summary",
    "tenant_hash",
    "to_json",
]

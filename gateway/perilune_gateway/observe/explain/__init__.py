"""Explains why each request was routed as it was, from one record per decision.

    Recorder ──add──▶ Decisions ──get, query──▶ DecisionRecord ─┬─▶ sentence
                                                                 ├─▶ summary, to_json ─▶ admin, CLI
                                                                 └─▶ counterfactual

Every decision and refusal makes one `DecisionRecord` with the values that the policy saw (model/record.py).
decisions.py keeps the last ones. Explanations are made from a record when a page asks for them: a sentence
(words.py), JSON (page.py), the time and cached tokens that an endpoint promised (expectation.py), and what
the other policies would have done (other_policies.py). decision_log writes records to a file, metrics.py
counts them.
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

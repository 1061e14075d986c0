"""Passes every decision and every end of a request to metrics, the log, the kept decisions, the decision
log and the spans.

A listener (state/facts.py) of one pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from perilune_gateway.model import SessionKey, Subject
from perilune_gateway.observe.decision_log import DecisionLog
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.explain import sentence
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.spans import Span, is_sampled, span_of
from perilune_gateway.state.facts import EndpointLeft, HandedOver, PolicyFailed
from perilune_gateway.state.request_facts import Ended, FirstToken, Recorded

log = logging.getLogger(__name__)


class Recorder:
    """Records one gateway's decisions."""

    def __init__(
        self,
        metrics: Metrics,
        decisions: Decisions,
        decision_log: DecisionLog | None = None,
        send_span: Callable[[Span], None] | None = None,
    ) -> None:
        """`send_span` takes the spans of requests that have ended, and must not wait."""
        self._metrics = metrics
        self._decisions = decisions
        self._decision_log = decision_log
        self._send_span = send_span

    def on_recorded(self, fact: Recorded) -> None:
        record = fact.record
        self._metrics.decided(record)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decision request_id=%s %s", record.request_id, sentence(record))
        number = self._decisions.add(record)
        if fact.request:
            fact.request.number = number
        if self._send_span and is_sampled(record):
            if fact.request:
                fact.request.traced = record
            else:
                self._send_span(span_of(record, None))
        if self._decision_log:
            self._decision_log.decided(number, record)

    def on_ended(self, fact: Ended) -> None:
        number, ending = fact.request.number, fact.ending
        self._metrics.ended(fact.request.target, ending.outcome)
        self._decisions.finish(number, ending)
        if self._decision_log:
            self._decision_log.ended(number, ending)
        if self._send_span and fact.request.traced:
            self._send_span(span_of(fact.request.traced, ending))

    def on_first_token(self, fact: FirstToken) -> None:
        self._metrics.first_token(fact.seconds)

    def on_policy_failed(self, fact: PolicyFailed) -> None:
        self._metrics.policy_failed(fact.policy, fact.kind)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self._metrics.forget(fact.address)

    def on_handed_over(self, fact: HandedOver) -> None:
        record, move = fact.record, fact.record.move
        log.info(
            "hand-off outcome=%s%s reason=%s %s source=%s target=%s tokens=%d bytes=%d rounds=%d s=%.3f",
            record.outcome,
            f" cause={record.cause}" if record.cause else "",
            move.reason,
            _subject(move.subject),
            move.source,
            move.target,
            record.tokens,
            record.transfer_bytes,
            record.rounds,
            record.seconds,
        )
        if self._decision_log:
            self._decision_log.handed_over(record)


def _subject(subject: Subject) -> str:
    if isinstance(subject, SessionKey):
        return f"session={subject.session_id}"
    if isinstance(subject, bytes):
        return f"session_name={subject.hex()}"
    return "prefix" if isinstance(subject, int) else f"request={subject}"

"""NVIDIA's AIPerf as the arena's client, in place of the lab's own: another program sends and measures.

    sessions ─▶ lines (multi-turn, with times) ─▶ aiperf profile ─▶ its records ─▶ results (one for each turn)

It sends what the lab's client sends, but for two things: each message is the user's, without tool calls, and
a session's turns carry `X-Correlation-ID` in any case. Turns that it does not send, because an earlier one of
their session failed, count as failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune_lab.load.bodies import Words
from perilune_lab.load.client import SESSION_HEADER
from perilune_lab.load.result import Result
from perilune_lab.traces.model import Session

RECORDS = "profile_export.jsonl"


def lines(sessions: Iterable[Session], words: Words) -> Iterator[dict[str, Any]]:
    """Yield a line for each session: each turn has the text that is new in its prompt, and its length."""
    for session in sessions:
        turns: list[dict[str, Any]] = []
        known = 0
        for turn in session.turns:
            new = turn.prompt[known:]
            known = len(turn.prompt) + 1  # the answer follows
            text = " ".join(words(segment.key, segment.tokens) for segment in new)
            when = {"delay": round(1000 * turn.gap_s)} if turns else {"timestamp": _begins_ms(session)}
            turns.append({"text": text, "output_length": turn.output_tokens, **when})
        # AIPerf looks for a time here before it believes that the turns have some.
        yield {"session_id": session.session_id, "timestamp": _begins_ms(session), "turns": turns}


def _begins_ms(session: Session) -> int:
    return 1 + round(1000 * session.start_s)


def command(program: str, url: str, model: str, folder: Path, tokenizer: str, named: bool) -> list[str]:
    """Return the command line that plays `folder/sessions.jsonl` and leaves its records in `folder`. `named`:
    whether turns carry the lab's session header."""
    return [
        *(program, "profile", "--model", model, "--url", url, "--tokenizer", tokenizer),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--input-file", str(folder / "sessions.jsonl"), "--custom-dataset-type", "multi_turn"),
        *("--fixed-schedule", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *(("--session-header", SESSION_HEADER) if named else ()),
        *("--output-artifact-dir", str(folder), "--ui-type", "none"),
    ]


def results(records: Iterable[bytes], sessions: Sequence[Session]) -> list[Result]:
    """Return a result for each turn of the sessions: AIPerf's, or a failure if it has none. Raises
    ValueError, KeyError or TypeError for a record of another form or of an unknown turn."""
    said = [json.loads(record) for record in records if record.strip()]
    began_ns = min((one["metadata"]["request_start_ns"] for one in said), default=0)
    sent = [_result(one, began_ns) for one in said]
    unsent = {(turn.session, turn.number) for session in sessions for turn in session.turns}
    if unknown := {(result.session, result.turn) for result in sent} - unsent:
        raise ValueError(f"no session has the turn {min(unknown)}")
    unsent -= {(result.session, result.turn) for result in sent}
    ended_s = max((result.finished_at_s for result in sent), default=0.0)
    return [*sent, *(_unsent(session, turn, ended_s) for session, turn in sorted(unsent))]


def _unsent(session: str, turn: int, at_s: float) -> Result:
    return Result(
        session=session,
        turn=turn,
        request_id="",
        submitted_at_s=at_s,
        finished_at_s=at_s,
        due_at_s=at_s,
        error="AIPerf has not sent it",
    )


def _result(one: Mapping[str, Any], began_ns: int) -> Result:
    about = one["metadata"]
    found = {name: metric["value"] for name, metric in one["metrics"].items()}
    error = one.get("error") or {}
    submitted_s = (about["request_start_ns"] - began_ns) / 1e9
    return Result(
        session=about["conversation_id"],
        turn=about["turn_index"],
        request_id=about["x_request_id"],
        submitted_at_s=submitted_s,
        finished_at_s=(about["request_end_ns"] - began_ns) / 1e9,
        due_at_s=submitted_s,
        status=int(error.get("code") or 0) if error else 200,
        error=str(error.get("message") or error.get("type") or "failed") if error else "",
        ttft_s=_seconds(found.get("time_to_first_token")),
        tpot_s=_seconds(found.get("inter_token_latency")),
        e2e_s=_seconds(found.get("request_latency")),
        prompt_tokens=int(found.get("usage_prompt_tokens") or 0),
        cached_tokens=_count(found.get("usage_prompt_cache_read_tokens")),
        output_tokens=int(found.get("usage_completion_tokens") or 0),
        counted="usage_prompt_tokens" in found,
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)

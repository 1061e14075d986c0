"""The load client sends sessions on time and notes what came back."""

import asyncio
from dataclasses import replace
from itertools import count, pairwise

import pytest
from openai_server import DONE, Server, delta, sse, usage, words
from waiting import HANG

from perilune_api.pool import SpecError
from perilune_lab.load.client import Load, TargetError, may_retry, models, retry_pause_s, run_load
from perilune_lab.load.result import Result
from perilune_lab.traces.model import Mode, Role, Segment, Session, Style, Turn

SYSTEM = Segment("system", 2, Role.SYSTEM)
TASK = Segment("task", 3, Role.USER)


def words_for(key: str, tokens: int) -> str:
    return f" {key}" * tokens


def session(name: str = "a", *, turns: int = 1, output_tokens: int = 3, gap_s: float = 0.0) -> Session:
    """Return a chat: system and task, then for each turn an answer and a tool result."""
    prompt: tuple[Segment, ...] = (SYSTEM, TASK)
    made = []
    for number in range(turns):
        made.append(
            Turn(
                session=name,
                number=number,
                prompt=prompt,
                output_tokens=output_tokens,
                gap_s=gap_s,
                timestamp_s=number * 1.0,
            )
        )
        prompt = (*prompt, made[-1].answer, Segment(f"{name}/tool{number}", 1, Role.TOOL))
    return Session(name, 0.0, tuple(made))


def load(server: Server, **changes: object) -> Load:
    return Load(**{"target": server.url, "model": "m", "speed": 1000.0} | changes)


async def play(server: Server, *sessions: Session, **changes: object) -> list[Result]:
    return await run_load(sessions, load(server, **changes), words_for)


async def test_a_request_asks_for_what_the_trace_says(server: Server):
    await play(server, session(output_tokens=5))
    (body,) = server.bodies
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": " system system"},
            {"role": "user", "content": " task task task"},
        ],
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["x-session-id"] == "a"
    assert server.headers[0]["x-perilune-decision"] == "1"


async def test_text_prompts_are_their_segments_joined(server: Server):
    turn = Turn(session="a", number=0, prompt=(Segment("b1", 2), Segment("b2", 1)), output_tokens=1)
    await play(server, Session("a", 0.0, (turn,)), style=Style.TEXT, send_session=False)
    assert server.paths == ["/v1/completions"]
    assert server.bodies[0]["prompt"] == " b1 b1 b2"
    assert "x-session-id" not in server.headers[0]


async def test_a_result_says_what_was_measured(server: Server):
    (result,) = await play(server, session(output_tokens=3))
    assert result.succeeded
    assert (result.session, result.turn, result.status) == ("a", 0, 200)
    assert (result.endpoint, result.reason, result.request_id) == ("10.0.0.0:8000", "host", "r0")
    assert (result.prompt_tokens, result.cached_tokens, result.output_tokens, result.counted) == (
        100,
        40,
        3,
        True,
    )
    assert result.ttft_s is not None
    assert result.e2e_s == pytest.approx(result.ttft_s + sum(result.itl_s))
    assert result.tpot_s == pytest.approx(sum(result.itl_s) / 2)
    assert 0 <= result.due_at_s <= result.submitted_at_s < result.finished_at_s


async def test_one_token_has_no_tpot(server: Server):
    (result,) = await play(server, session(output_tokens=1))
    assert (result.tpot_s, result.itl_s) == (None, ())


async def test_later_turns_carry_the_models_own_answers(server: Server):
    await play(server, session(turns=3, output_tokens=2))
    contents = [message["content"] for message in server.bodies[2]["messages"]]
    assert contents == [" system system", " task task task", " w0 w1", " a/tool0", " w0 w1", " a/tool1"]
    roles = [message["role"] for message in server.bodies[2]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]


async def test_each_prompt_extends_the_one_before(server: Server):
    await play(server, session(turns=4))
    messages = [body["messages"] for body in server.bodies]
    assert all(b[: len(a)] == a for a, b in pairwise(messages))


async def test_turns_of_a_session_wait_for_the_answer_and_the_gap(server: Server):
    results = await play(server, session(turns=3, gap_s=20.0))
    for before, after in pairwise(results):
        assert after.submitted_at_s >= after.due_at_s >= before.finished_at_s + 0.020


@pytest.mark.parametrize(
    ("gap_s", "changes"),
    [
        pytest.param(20.0, {}, id="speed"),
        pytest.param(2000.0, {"time_scale": 100.0}, id="time scale and speed"),
    ],
)
async def test_time_scale_and_speed_both_shorten_gaps(
    server: Server, monkeypatch: pytest.MonkeyPatch, gap_s: float, changes: dict[str, float]
):
    monkeypatch.setattr("perilune_lab.load.client.perf_counter", lambda: 7.0)  # requests take no time
    first, second = await play(server, session(turns=2, gap_s=gap_s), **changes)
    assert second.due_at_s - first.finished_at_s == pytest.approx(0.020)


async def test_no_more_requests_are_open_than_allowed(server: Server):
    results = await play(server, *(session(f"s{i}") for i in range(20)), concurrency=3)
    assert len(results) == 20
    assert server.most_open <= 3


async def test_timestamps_are_submitted_in_their_order_whatever_the_session(server: Server):
    results = await play(
        server, session("a", turns=3), session("b", turns=3), mode=Mode.TIMESTAMPS, concurrency=1
    )
    order = [(r.turn, r.session) for r in sorted(results, key=lambda r: r.submitted_at_s)]
    assert order == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]


async def test_max_waits_for_the_timestamp_and_the_answer(server: Server):
    results = await play(server, session("a", turns=3), mode=Mode.MAX, speed=50.0)
    assert [r.turn for r in results] == [0, 1, 2]
    assert results[2].submitted_at_s >= 2 / 50
    assert all(b.submitted_at_s >= a.finished_at_s for a, b in pairwise(results))


async def test_timestamps_without_times_are_the_users_mistake(server: Server):
    turn = Turn(session="a", number=0, prompt=(TASK,), output_tokens=1)
    with pytest.raises(SpecError, match="turn 0 of session a has no timestamp"):
        await play(server, Session("a", 0.0, (turn,)), mode=Mode.TIMESTAMPS)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        pytest.param(
            429, b'{"error":{"message":"all queues are full"}}', "429: all queues are full", id="openai"
        ),
        pytest.param(404, b'{"object":"error","message":"no model"}', "404: no model", id="old-vllm"),
        pytest.param(503, b"upstream connect error", "503: upstream connect error", id="envoy"),
        pytest.param(500, b"", "500", id="empty"),
    ],
)
async def test_a_refusal_keeps_its_cause(server: Server, status: int, body: bytes, error: str):
    server.answer = lambda *_: (status, {"x-perilune-refused": "overloaded"}, [body])
    (result,) = await play(server, session())
    assert (result.status, result.error, result.reason) == (status, error, "overloaded")
    assert result.rejected is (status == 429)
    assert result.ttft_s is None


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        pytest.param([sse(delta(" x"), usage(1, 1))], "the stream ended before [DONE]", id="no-done"),
        pytest.param([sse({"error": {"message": "gone"}}, DONE)], "gone", id="error-event"),
    ],
)
async def test_a_broken_stream_is_a_failure(server: Server, chunks: list[bytes], error: str):
    server.answer = lambda *_: (200, {}, chunks)
    (result,) = await play(server, session())
    assert (result.status, result.error) == (200, error)


async def test_an_unreachable_target_is_a_result_and_the_session_goes_on():
    sessions = [session(turns=2)]
    results = await run_load(sessions, Load(target="http://127.0.0.1:1", model="m", speed=1000), words_for)
    assert [r.status for r in results] == [0, 0]
    assert results[0].error == "cannot connect: Connection refused"


async def test_missing_answers_are_replaced_by_words(server: Server):
    server.answer = lambda body, n: (500, {}, [b""])
    await play(server, session(turns=2, output_tokens=2))
    answer = server.bodies[1]["messages"][2]
    assert (answer["role"], answer["content"]) == ("assistant", " a/answer0 a/answer0")


async def test_an_endpoint_that_names_itself_is_believed(server: Server):
    headers = {"x-perilune-endpoint": "10.9.9.9:1", "x-perilune-decision": "10.0.0.1:1; cold; request=q"}
    server.answer = lambda *_: (200, headers, [sse(delta(" x"), usage(1, 1), DONE)])
    (result,) = await play(server, session())
    assert (result.endpoint, result.reason, result.simulated) == ("10.9.9.9:1", "cold", True)
    assert result.cached_tokens is None


async def test_after_its_seconds_no_turn_is_submitted_and_open_ones_end():
    """Each answer takes as long as the whole run, so the run's seconds are over when the first one comes."""
    seconds, results = 0.05, []

    async def whole_run() -> None:
        await asyncio.sleep(seconds)

    while not results:  # a machine that is busy may not have begun a request in that time
        seconds *= 2
        async with Server(pause=whole_run) as server:
            endless = (replace(session(f"s{i}", turns=100), start_s=i / 10) for i in count())
            limits = load(server, seconds=seconds, grace_s=HANG, concurrency=4)
            results = await run_load(endless, limits, words_for)
    assert all(r.succeeded and r.turn == 0 for r in results)
    assert len(results) == len(server.bodies) <= 4


async def test_stop_ends_at_once_and_keeps_what_was_measured(server: Server):
    stop = asyncio.Event()
    seen: list[Result] = []

    def on_result(result: Result) -> None:
        seen.append(result)
        if len(seen) == 3:
            stop.set()

    sessions = [session(turns=1000, gap_s=5.0)]
    results = await run_load(sessions, load(server), words_for, on_result, stop)
    assert results == seen
    assert 3 <= len(results) < 10


async def test_a_bug_in_the_callback_travels_up(server: Server):
    def on_result(_: Result) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await run_load([session()], load(server), words_for, on_result)
    assert caught.group_contains(ZeroDivisionError)


async def test_a_refused_request_comes_again_and_counts_from_its_first_attempt(server: Server):
    server.answer = lambda body, number: (429, {}, [b""]) if number == 0 else words(body, number)
    refused, answered, later = await play(server, session(turns=2), retry=True)
    assert (refused.status, answered.succeeded, answered.turn, later.turn) == (429, True, 0, 1)
    assert answered.due_at_s == refused.due_at_s
    assert answered.submitted_at_s >= refused.finished_at_s + retry_pause_s(refused, 0)


async def test_a_session_ends_with_a_request_that_may_not_be_sent_again(server: Server):
    server.answer = lambda body, number: (400, {}, [b""])
    (result,) = await play(server, session(turns=3), retry=True)
    assert result.status == 400


@pytest.mark.parametrize(
    ("retry_after_s", "attempt", "pause_s"),
    [
        pytest.param(7.0, 1, 7.0, id="as the server asks"),
        pytest.param(61.0, 0, 0.5, id="the server asks for too much"),
        pytest.param(None, 0, 0.5, id="first"),
        pytest.param(None, 1, 1.0, id="second"),
        pytest.param(None, 9, 8.0, id="never more"),
    ],
)
def test_pauses_are_those_of_openais_sdks(retry_after_s: float | None, attempt: int, pause_s: float):
    result = Result(
        session="a",
        turn=0,
        request_id="r",
        submitted_at_s=0.0,
        finished_at_s=0.0,
        due_at_s=0.0,
        status=429,
        retry_after_s=retry_after_s,
    )
    assert retry_pause_s(result, attempt) == pause_s


@pytest.mark.parametrize(
    ("status", "again"),
    [(0, True), (408, True), (409, True), (429, True), (503, True), (400, False), (404, False)],
)
def test_statuses_that_are_sent_again_are_those_of_openais_sdks(status: int, again: bool):
    assert (
        may_retry(
            Result(
                session="a",
                turn=0,
                request_id="r",
                submitted_at_s=0.0,
                finished_at_s=0.0,
                due_at_s=0.0,
                status=status,
                error="no",
            )
        )
        is again
    )


async def test_models_are_what_the_target_serves(server: Server):
    assert await models(server.url) == ["m"]


async def test_no_models_without_a_target():
    with pytest.raises(TargetError, match=r"^http://127.0.0.1:1/v1/models: cannot connect: "):
        await models("http://127.0.0.1:1")

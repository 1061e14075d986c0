"""The command, in process, against a server of this test; Ctrl-C and rendering included."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from openai_server import Server, sse, usage, words
from waiting import HANG

from perilune_lab import replay


class Thread:
    """A server on a loop of its own, as `main` runs one itself."""

    def __init__(self) -> None:
        self.server = Server()
        self.admin_url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> "Thread":
        self._thread.start()
        assert self._ready.wait(HANG)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/api/nodes/stats", nodes)
        app.router.add_get("/api/decisions", decisions)
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.admin_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with self.server:
            self._ready.set()
            await self._end.wait()
        await runner.cleanup()


async def nodes(_: web.Request) -> web.Response:
    rows = [{"load": {"running": 2, "waiting": 0}}, {"load": {"running": 0, "waiting": 0}}]
    return web.json_response({"nodes": rows})


async def decisions(_: web.Request) -> web.Response:
    rows = [
        {"policy": "", "scheduling_us": None},
        *({"policy": "ear", "scheduling_us": us} for us in (100, 300)),
    ]
    return web.json_response({"decisions": rows})


async def metrics(_: web.Request) -> web.Response:
    lines = [
        "# TYPE perilune_scheduling_seconds histogram",
        *(
            f'perilune_scheduling_seconds_{part}{{step="{step}"}} {value}'
            for step, total, count in (("index", 0.004, 2), ("parse", 0, 0), ("total", 0.01, 2))
            for part, value in (("sum", total), ("count", count))
        ),
    ]
    return web.Response(text="\n".join(lines) + "\n")


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread() as thread:
        yield thread


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two sessions of two turns, and one of one."""
    path = tmp_path / "t.jsonl"
    rows = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 0)]
    lines = [
        {"session": s, "turn": n, "timestamp_s": i, "input_tokens": 50 * (n + 1), "output_tokens": 3}
        for i, (s, n) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(thread: Thread, trace: Path | str, *more: str) -> int:
    return replay.main(["--target", thread.server.url, "--trace", str(trace), "--speed", "1000", *more])


@pytest.mark.parametrize("mode", ["thinktime", "timestamps", "max"])
def test_a_file_is_played(thread: Thread, trace: Path, capsys: pytest.CaptureFixture[str], mode: str):
    assert run(thread, trace, "--mode", mode) == 0
    printed = capsys.readouterr()
    assert f"5 requests, 3 sessions; mode {mode}, speed 1000, time scale 1" in printed.err.replace("\n", " ")
    assert "5/5 requests" in printed.err
    assert f"t.jsonl · {mode}" in printed.out
    assert "40.0%" in printed.out
    assert len(thread.server.bodies) == 5


def test_generated_load_is_played_up_to_its_limit(thread: Thread):
    assert run(thread, "agentic", "--limit", "4", "--seed", "2", "--sessions", "10", "--speed", "1e9") == 0
    assert len(thread.server.bodies) == 4
    assert thread.server.paths[0] == "/v1/chat/completions"


def test_the_report_has_what_the_gateway_tells(thread: Thread, trace: Path, tmp_path: Path):
    out, png = tmp_path / "r.json", tmp_path / "r.png"
    assert run(thread, trace, "--gateway", thread.admin_url, "--json", str(out), "--png", str(png)) == 0
    document = json.loads(out.read_text())
    (found,) = document["runs"]
    assert document["endpoints"] == 2
    assert document["simulated"] is False
    assert document["trace"]["file"] == "t.jsonl"
    assert found["policy"] == "ear"
    assert found["node_load_variance"] == 1.0
    assert found["scheduling_ms"] == {"mean": 0.2, "p50": 0.2, "p99": 0.298, "by_phase": {"index": 2.0}}
    assert found["migrations"]["total"] == 0
    assert "interference" not in found
    assert png.stat().st_size > 1000


def test_every_request_is_a_line(thread: Thread, trace: Path, tmp_path: Path):
    assert run(thread, trace, "--mode", "timestamps", "--requests", str(tmp_path / "r.jsonl")) == 0
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert sorted((row["session"], row["turn"]) for row in rows) == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
        ("c", 0),
    ]
    assert {row["endpoint"] for row in rows} == {"10.0.0.0:8000", "10.0.0.1:8000"}


def test_a_gateway_that_is_not_there_is_told_at_once_and_costs_its_fields_only(
    thread: Thread, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "r.json"
    assert run(thread, trace, "--gateway", "http://127.0.0.1:1", "--json", str(out)) == 0
    said = capsys.readouterr().err
    assert said.index("no gateway's admin pages at http://127.0.0.1:1") < said.index("report:")
    document = json.loads(out.read_text())
    assert "endpoints" not in document
    assert not {"scheduling_ms", "node_load_variance"} & set(document["runs"][0])


def test_failures_are_listed_by_cause(thread: Thread, trace: Path, capsys: pytest.CaptureFixture[str]):
    thread.server.answer = lambda body, n: (
        words(body, n) if n else (503, {}, [b'{"error":{"message":"full"}}'])
    )
    assert run(thread, trace) == 0
    printed = capsys.readouterr()
    assert "1 × 503: full" in printed.err
    assert "5/5 requests 1 failed" in printed.err
    assert "80.0%" in printed.out


def test_nothing_succeeded_is_1(thread: Thread, trace: Path, capsys: pytest.CaptureFixture[str]):
    thread.server.answer = lambda *_: (500, {}, [b"boom"])
    assert run(thread, trace) == 1
    assert "5 × 500: boom" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured_and_is_130(
    thread: Thread, trace: Path, capsys: pytest.CaptureFixture[str]
):
    def answer(body: dict, number: int) -> tuple[int, dict, list[bytes]]:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return words(body, number)

    thread.server.answer = answer
    assert run(thread, trace, "--mode", "timestamps", "--speed", "5") == 130
    printed = capsys.readouterr()
    assert "stopped after" in printed.err
    assert "requests" in printed.out


def test_the_target_is_down(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert replay.main(["--target", "http://127.0.0.1:1", "--trace", str(trace)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("perilune replay: nothing to measure at http://127.0.0.1:1: ")
    assert "cannot connect: " in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--trace", "absent"], "absent: No such file or directory", id="no-file"),
        pytest.param(
            ["--trace", "BAD"], "bad.jsonl:2: Expected `int`, got `str` - at `$.output_length`", id="bad"
        ),
        pytest.param(
            ["--trace", "agentic", "--mode", "timestamps"],
            "agentic has no timestamps, which mode timestamps needs - at `--mode`",
            id="no-times",
        ),
    ],
)
def test_the_users_mistakes_are_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
):
    bad = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
    bad.write_text(good + good.replace('th": 1, "h', 'th": "x", "h'))
    argv = [str(bad) if word == "BAD" else word for word in argv]
    assert replay.main(["--target", "http://127.0.0.1:1", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--target", "127.0.0.1:1", "--trace", "agentic"],
        ["--target", "http://x", "--trace", "agentic", "--speed", "0"],
        ["--target", "http://x", "--trace", "agentic", "--limit", "0"],
        ["--target", "http://x", "--trace", "agentic", "--mode", "fast"],
        ["--target", "http://x", "--trace", "agentic", "--json", "/nowhere/r.json"],
        ["--target", "http://x", "--trace", "agentic", "--requests", "/nowhere/r.json"],
    ],
)
def test_a_wrong_call_is_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        replay.main(argv)
    assert caught.value.code == 2


def test_v1_in_the_target_is_taken_off():
    options = replay.parse(["--target", "http://h:1/v1/", "--trace", "agentic"])
    assert options.target == "http://h:1"


def test_a_simulated_endpoint_makes_the_report_simulated(
    thread: Thread, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    body = [sse({"choices": [{"delta": {"content": " x"}}]}, usage(50, 1, 0), "[DONE]")]
    thread.server.answer = lambda *_: (200, {"x-perilune-endpoint": "10.0.0.1:1"}, body)
    assert run(thread, trace, "--time-scale", "10", "--json", str(tmp_path / "r.json")) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["simulated"] is True
    assert document["runs"][0]["wall_clock_factor"] > 0
    assert "simulated, engine seconds (time scale 10)" in capsys.readouterr().out

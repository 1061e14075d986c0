"""The process: its API on the wire, its sockets, its end."""

import asyncio
import json
import signal
import socket
import struct
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from forked import Popen
from prometheus_client.parser import text_string_to_metric_families
from waiting import HANG, until_true

from perilune_gateway.feeds import engine_metrics
from perilune_lab.vocabulary import LabTokenizer, Vocabulary

pytestmark = pytest.mark.processes

FAST = ("--time-scale", "50")
VOCABULARY = Vocabulary()
PROMPT = VOCABULARY.words_for("prompt", 200)


def chat(content: str = PROMPT, **more):
    return {"model": "sim-30b", "messages": [{"role": "user", "content": content}], "max_tokens": 5, **more}


def completion(prompt=PROMPT, **more):
    return {"model": "sim-30b", "prompt": prompt, "max_tokens": 5, **more}


async def ask(url: str, body, **more):
    """(status, headers, JSON)."""
    async with aiohttp.ClientSession() as http, http.post(url, json=body, **more) as answer:
        return answer.status, answer.headers, await answer.json()


async def get(url: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return answer.status, await answer.read()


async def stream(url: str, body, **more) -> list[tuple[str, object]]:
    """(event, data) of a streamed answer, data decoded where it is JSON."""
    async with aiohttp.ClientSession() as http, http.post(url, json=body, **more) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = (await answer.read()).decode()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


async def metric(url: str, name: str) -> float:
    _, page = await get(f"{url}/metrics")
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    raise AssertionError(name)


# generation


async def test_chat_streams_one_chunk_per_token_then_usage_and_done(engine):
    body = chat(stream=True, stream_options={"include_usage": True})
    events = await stream(f"{engine.url}/v1/chat/completions", body)
    assert events[-1] == ("", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]]
    assert len(texts) == 5
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 5 + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 205,
        "completion_tokens": 5,
        "total_tokens": 210,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    _, _, whole = await ask(f"{engine.url}/v1/chat/completions", chat())
    assert whole["choices"][0]["message"]["content"] == "".join(texts)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}


async def test_a_stream_says_usage_only_when_asked(engine):
    events = await stream(f"{engine.url}/v1/completions", completion(stream=True))
    assert all("usage" not in data for _, data in events[:-1])
    assert [data["choices"][0]["finish_reason"] for _, data in events[:-1]] == [None] * 4 + ["length"]


async def test_a_prompt_may_be_text_or_ids_and_its_ids_come_back_on_demand(engine):
    ids = VOCABULARY.ids_for("prompt", 200)
    url = f"{engine.url}/v1/completions"
    answers = [
        (await ask(url, completion(p, return_token_ids=True)))[2] for p in (PROMPT, ids, [PROMPT], [ids])
    ]
    choices = [answer["choices"][0] for answer in answers]
    assert [choice["prompt_token_ids"] for choice in choices] == [ids] * 4
    assert len({choice["text"] for choice in choices}) == 1
    assert LabTokenizer(VOCABULARY).decode(choices[0]["token_ids"]) == choices[0]["text"]
    events = await stream(url, completion(ids, stream=True, return_token_ids=True))
    streamed = [data["choices"][0]["token_ids"] for _, data in events[:-1]]
    assert [token for ids in streamed for token in ids] == choices[0]["token_ids"]


async def test_the_same_prompt_gets_the_same_answer_on_every_engine_and_the_next_turn_hits_it(start):
    one, two = start(*FAST), start(*FAST, "--block-size", "32")
    body = chat(max_tokens=100)
    answers = [
        (await ask(f"{e.url}/v1/chat/completions", {**body, "seed": i}))[2] for i, e in enumerate((one, two))
    ]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    messages = [
        *body["messages"],
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": " go on"},
    ]
    _, _, next_turn = await ask(f"{one.url}/v1/chat/completions", {**body, "messages": messages})
    usage = next_turn["usage"]
    # 205 prompt + 99 answer tokens have KV: 19 blocks of 16.
    assert usage["prompt_tokens_details"]["cached_tokens"] == 304
    assert usage["prompt_tokens"] > 306


async def test_responses_api(engine):
    url = f"{engine.url}/v1/responses"
    body = {"model": "sim-30b", "instructions": " ba", "input": PROMPT, "max_output_tokens": 3}
    _, _, whole = await ask(url, body)
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    events = await stream(url, {**body, "stream": True})
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(11))
    text = "".join(data["delta"] for name, data in events if name.endswith("delta"))
    assert text == whole["output"][0]["content"][0]["text"]
    usage = events[-1][1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 208
    assert usage["output_tokens"] == 3
    _, _, natural = await ask(url, {"model": "sim-30b", "input": PROMPT})
    assert natural["status"] == "completed"


async def test_a_response_continues_a_stored_one(start):
    engine = start(*FAST, "--responses-store")
    url = f"{engine.url}/v1/responses"
    turn = {"model": "sim-30b", "input": PROMPT, "instructions": " bo", "max_output_tokens": 5}
    _, _, first = await ask(url, turn)
    _, _, second = await ask(url, {**turn, "input": " bi", "previous_response_id": first["id"]})
    talk = [
        {"role": "system", "content": " bo"},
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
        {"role": "user", "content": " bi"},
    ]
    _, _, told = await ask(f"{engine.url}/tokenize", {"model": "sim-30b", "messages": talk})
    assert second["usage"]["input_tokens"] == told["count"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > first["usage"]["input_tokens"] - 16


@pytest.mark.parametrize("stored", [False, True], ids=["nothing is stored", "unknown"])
async def test_a_response_that_is_not_stored_here_is_not_found(start, stored):
    engine = start(*FAST, *(["--responses-store"] if stored else []))
    url = f"{engine.url}/v1/responses"
    turn = {"model": "sim-30b", "input": PROMPT, "max_output_tokens": 1}
    _, _, first = await ask(url, turn)
    earlier = "resp_x" if stored else first["id"]
    status, _, error = await ask(url, {**turn, "previous_response_id": earlier})
    assert (status, error["error"]["message"]) == (404, f"Response with id '{earlier}' not found.")


async def test_messages_api(engine):
    url = f"{engine.url}/v1/messages"
    content = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": " bi"}]},
        {"type": "text", "text": PROMPT},
    ]
    body = {"model": "sim-30b", "system": [{"type": "text", "text": " ba"}], "max_tokens": 3}
    body["messages"] = [{"role": "user", "content": content}]
    _, _, whole = await ask(url, body)
    assert (whole["type"], whole["stop_reason"]) == ("message", "max_tokens")
    events = await stream(url, {**body, "stream": True})
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    usage = events[-2][1]["usage"]
    assert usage["cache_read_input_tokens"] == 208
    _, _, counted = await ask(f"{url}/count_tokens", body)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


async def test_ids_and_the_serving_endpoint_are_told(engine):
    _, headers, answer = await ask(
        f"{engine.url}/v1/completions", completion(), headers={"X-Request-Id": "abc"}
    )
    assert answer["id"] == "cmpl-abc"
    assert headers["x-request-id"] == "abc"
    assert headers["x-perilune-endpoint"] == engine.facts["http"]


async def test_names_that_are_no_text_harm_nobody(engine):
    host, _, port = engine.facts["http"].rpartition(":")
    body = json.dumps(completion()).encode()
    for _ in range(2):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-session-id: \xff\xfe\x80\r\n"
            b"x-request-id: \xff\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"x-request-id: ?" in answer.lower()


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        pytest.param("chat/completions", b'{"model": "sim', 400, "BadRequestError", id="bad JSON"),
        pytest.param("chat/completions", b'{"messages": 5}', 400, "BadRequestError", id="wrong type"),
        pytest.param("chat/completions", completion(), 400, "BadRequestError", id="no messages"),
        pytest.param("chat/completions", chat(model="x"), 404, "NotFoundError", id="unknown model"),
        pytest.param("completions", completion(" ba" * 1100), 400, "BadRequestError", id="too long"),
        pytest.param("completions", completion(max_tokens=900), 400, "BadRequestError", id="answer too long"),
        pytest.param("completions", completion(max_tokens=0), 400, "BadRequestError", id="no tokens wanted"),
        pytest.param("completions", completion(n=2), 400, "BadRequestError", id="two answers"),
        pytest.param("completions", completion(["a", "b"]), 400, "BadRequestError", id="two prompts"),
        pytest.param("completions", completion([1, -1]), 400, "BadRequestError", id="negative id"),
        pytest.param("completions", completion(""), 400, "BadRequestError", id="empty prompt"),
        pytest.param("nowhere", b"{}", 404, "NotFoundError", id="unknown path"),
    ],
)
async def test_refusals_have_openais_form(shared, path, body, status, kind):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as http, http.post(f"{shared.url}/v1/{path}", data=data) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, kind)
    assert error["message"]


# the rest of the surface


async def test_small_pages(shared):
    pages = {}
    for path in ("health", "ping", "version", "v1/models", "load", "kv_event_sources"):
        status, body = await get(f"{shared.url}/{path}")
        assert status == 200
        pages[path] = json.loads(body) if body else None
    assert pages["health"] is pages["ping"] is None
    assert pages["version"] == {"version": "0.32.0"}
    assert pages["load"] == {"server_load": 0}
    (model,) = pages["v1/models"]["data"]
    assert (model["id"], model["max_model_len"], model["parent"]) == ("sim-30b", 1000, None)
    (source,) = pages["kv_event_sources"].values()
    assert (source["endpoint"], source["replay_endpoint"]) == (shared.facts["events"], shared.facts["replay"])
    assert source["topic"] == f"kv@{shared.facts['http']}@sim-30b"


async def test_tokenize_and_detokenize(shared):
    ids = VOCABULARY.ids_for("prompt", 200)
    _, _, text = await ask(f"{shared.url}/tokenize", {"model": "sim-30b", "prompt": PROMPT})
    assert (text["tokens"], text["count"], text["max_model_len"]) == (ids, 200, 1000)
    _, _, talk = await ask(f"{shared.url}/tokenize", {"messages": chat()["messages"]})
    assert talk["tokens"] == LabTokenizer(VOCABULARY).encode_chat(chat()["messages"])
    _, _, back = await ask(f"{shared.url}/detokenize", {"tokens": ids})
    assert back == {"prompt": PROMPT}
    status, _, error = await ask(f"{shared.url}/detokenize", {"tokens": [10**6]})
    assert (status, error["error"]["code"]) == (400, 400)


async def test_adapters_are_models_with_caches_of_their_own(start):
    engine = start(*FAST, "--lora", "tuned=/adapters/tuned")
    _, body = await get(f"{engine.url}/v1/models")
    card = json.loads(body)["data"][1]
    assert (card["id"], card["root"], card["parent"]) == ("tuned", "/adapters/tuned", "sim-30b")
    cached = []
    for model in ("sim-30b", "tuned", "tuned"):
        _, _, answer = await ask(f"{engine.url}/v1/completions", completion(model=model))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 192]


async def test_an_alias_is_the_model_with_its_cache(start):
    engine = start(*FAST, "--alias", "latest", "--alias", "default")
    _, body = await get(f"{engine.url}/v1/models")
    assert [card["id"] for card in json.loads(body)["data"]] == ["sim-30b", "latest", "default"]
    cached = []
    for model in ("sim-30b", "latest", "default"):
        _, _, answer = await ask(f"{engine.url}/v1/completions", completion(model=model))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 192, 192]


async def test_a_salt_separates_equal_prompts(engine):
    cached = []
    for salt in ("a", "b", "a", None):
        _, _, answer = await ask(f"{engine.url}/v1/completions", completion(cache_salt=salt))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 192, 0]


# leaving


async def test_a_client_that_leaves_frees_its_blocks(start):
    engine = start("--time-scale", "1")
    url = f"{engine.url}/v1/completions"
    async with aiohttp.ClientSession() as http:
        for stream_ in (True, False):
            body = completion(max_tokens=5000, stream=stream_)
            asking = asyncio.ensure_future(http.post(url, json=body))

            async def running() -> bool:
                return await metric(engine.url, "vllm:num_requests_running") == 1

            await until_true(running)
            assert await metric(engine.url, "vllm:kv_cache_usage_perc") > 0
            if stream_:
                answer = await asking
                await answer.content.readline()
                answer.close()
            else:
                asking.cancel()

            async def gone() -> bool:
                return await metric(engine.url, "vllm:num_requests_running") == 0

            await until_true(gone)
            assert await metric(engine.url, "vllm:kv_cache_usage_perc") == 0
    _, page = await get(f"{engine.url}/metrics")
    assert b'finished_reason="abort"} 2.0' in page


def test_clients_that_leave_at_once_are_no_error(start):
    engine = start(*FAST)
    host, port = engine.facts["http"].split(":")
    body = json.dumps(completion(stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(30):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + body)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert asyncio.run(ask(f"{engine.url}/v1/completions", completion()))[0] == 200
    engine.popen.terminate()
    assert engine.popen.communicate(timeout=HANG)[1] == ""


async def test_a_client_that_does_not_read_holds_nobody_up(start):
    engine = start("--time-scale", "200")
    host, port = engine.facts["http"].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        body = json.dumps(completion(max_tokens=60_000, stream=True)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readline()
        async with asyncio.timeout(HANG):
            for i in range(20):
                await ask(f"{engine.url}/v1/completions", completion([i] * 50, max_tokens=500))

            # Its answer is complete too, and holds no blocks; only its bytes wait.
            async def done() -> bool:
                return await metric(engine.url, "vllm:num_requests_running") == 0

            await until_true(done)
        received = b""
        while chunk := await asyncio.wait_for(reader.read(1 << 20), HANG):
            received += chunk
            if received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                break
        assert received.count(b'"text":') == 60_000
    finally:
        writer.close()


async def test_sigterm_waits_for_no_stream(start):
    engine = start("--time-scale", "1")
    async with aiohttp.ClientSession() as http:
        body = completion(max_tokens=5000, stream=True)
        answer = await http.post(f"{engine.url}/v1/completions", json=body)
        await answer.content.readline()
        engine.popen.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(engine.popen.wait, HANG)
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    assert status == 0
    assert engine.popen.stderr.read() == ""


def test_sigint_exits_130(start):
    engine = start()
    engine.popen.send_signal(signal.SIGINT)
    assert engine.popen.wait(HANG) == 130


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        pytest.param(["--listen", "127.0.0.1:99999"], 2, "--listen wants IP:PORT", id="port out of range"),
        pytest.param(
            ["--tokenizer", "/nowhere"], 1, "/nowhere/tokenizer.json: No such file", id="no tokenizer there"
        ),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_and_ends_without_a_traceback(arguments, status, words):
    wrong = Popen("perilune_lab.engine.main", arguments)
    _, said = wrong.communicate()
    assert wrong.returncode == status
    assert words in said.splitlines()[-1]


def test_metrics_have_a_port_of_their_own_with_nothing_else(start):
    engine = start("--metrics-listen", "127.0.0.1:0")
    alone = f"http://{engine.facts['metrics']}"
    with urlopen(f"{alone}/metrics", timeout=HANG) as page:
        assert b"vllm:num_requests_running" in page.read()
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{alone}/v1/models", timeout=HANG)


@pytest.mark.parametrize(
    ("argument", "fact", "words"),
    [
        pytest.param("--listen", "http", "in use; choose another port with --listen", id="HTTP"),
        pytest.param("--metrics-listen", "http", "choose another port with --metrics-listen", id="metrics"),
        pytest.param("--events", "events", "cannot bind tcp://127.0.0.1", id="events"),
        pytest.param("--replay", "replay", "; choose other ports with --events and --replay", id="replay"),
    ],
)
def test_a_taken_port_is_one_clear_line_and_exit_1(fast, argument, fact, words):
    second = Popen("perilune_lab.engine.main", [argument, fast.facts[fact]])
    _, said = second.communicate()
    assert second.returncode == 1
    assert said.count("\n") == 1
    assert said.startswith("perilune engine: ")
    assert words in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--block-size", "0"],
        ["--time-scale", "0"],
        ["--hash-algorithm", "md5"],
        ["--lora", "nameless"],
        ["--listen", "nowhere"],
        ["--kv-tokens", "9", "--num-gpu-blocks", "9"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_call_exits_2(arguments, capsys):
    from perilune_lab.engine.main import main

    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


# events


async def test_events_and_replay_carry_what_a_request_stored(start):
    engine = start(*FAST, "--hash-algorithm", "sha256_cbor", "--hash-seed", "0", "--name", "pod-0")
    context = zmq.asyncio.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        live.connect(engine.facts["events"])
        live.subscribe(b"")
        body = completion(max_tokens=20, session_id="body")
        url = f"{engine.url}/v1/completions"

        async def heard() -> bool:
            await ask(url, completion([1, 2, 3] * 20, cache_salt=str(time.monotonic())))
            return bool(await live.poll(50))

        await until_true(heard)  # PUB drops what is sent before the subscription is there
        while await live.poll(100):
            await live.recv_multipart()
        await ask(url, body, headers={"X-Session-ID": "header"})
        batches = [await asyncio.wait_for(live.recv_multipart(), HANG) for _ in range(2)]
        assert batches[0][0] == b"kv@pod-0@sim-30b"
        first_seq = int.from_bytes(batches[0][1], "big")
        assert int.from_bytes(batches[1][1], "big") == first_seq + 1
        (ts, events, rank), second = (msgspec.msgpack.decode(batch[2]) for batch in batches)
        assert rank == 0
        assert abs(ts - time.time()) < 30
        prompt = VOCABULARY.ids_for("prompt", 200)
        assert [event["token_ids"] for event in events] == [prompt[:192]]
        assert events[0]["session_id"] == "header"
        assert events[0]["parent_block_hash"] is None
        assert second[1][0]["parent_block_hash"] == events[0]["block_hashes"][-1]
        replay.connect(engine.facts["replay"])
        await replay.send_multipart([b"", first_seq.to_bytes(8, "big")])
        answers = [await asyncio.wait_for(replay.recv_multipart(), HANG) for _ in range(3)]
        assert answers[:2] == [[b"", *batch] for batch in batches]
        assert answers[2] == [b"", b"", b"\xff" * 8, b""]
    finally:
        live.close(linger=0)
        replay.close(linger=0)
        context.term()


async def test_without_events_the_ready_line_and_the_page_name_none(start):
    engine = start("--events", "none")
    assert set(engine.facts) == {"http"}
    _, body = await get(f"{engine.url}/kv_event_sources")
    assert json.loads(body) == {}


async def test_reset_empties_the_cache(engine):
    await ask(f"{engine.url}/v1/completions", completion())
    async with aiohttp.ClientSession() as http, http.post(f"{engine.url}/reset_prefix_cache") as answer:
        assert answer.status == 200
    _, _, answer = await ask(f"{engine.url}/v1/completions", completion())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_an_engine_that_sleeps_serves_nothing_and_has_forgotten_its_kv(engine):
    await ask(f"{engine.url}/v1/completions", completion())
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{engine.url}/sleep?level=1") as answer:
            assert answer.status == 200
        _, page = await get(f"{engine.url}/metrics")
        assert engine_metrics.parse(page).asleep
        async with http.post(f"{engine.url}/v1/completions", json=completion()) as answer:
            assert answer.status == 503
        async with http.post(f"{engine.url}/wake_up") as answer:
            assert answer.status == 200
    _, _, answer = await ask(f"{engine.url}/v1/completions", completion())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# bookkeeping


async def test_engines_share_a_store_and_the_log_says_what_came_from_it(start, tmp_path: Path):
    pool, log = str(tmp_path / "pool"), tmp_path / "log.jsonl"
    one, two = start(*FAST, "--store", pool), start(*FAST, "--store", pool, "--request-log", str(log))
    await ask(f"{one.url}/v1/completions", completion(session_id="s"))
    _, _, answer = await ask(f"{two.url}/v1/completions", completion(session_id="s"))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    _, _, answer = await ask(f"{two.url}/v1/completions", completion())
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["admitted"] for entry in entries] == [0, 1]
    assert [(e["cached_tokens"], e["store_tokens"], e["output_tokens"]) for e in entries] == [
        (192, 192, 5),
        (192, 0, 5),
    ]
    first = entries[0]
    assert (first["session_id"], first["prompt_tokens"], first["finish"]) == ("s", 200, "length")
    times = [first[k] for k in ("submitted_s", "admitted_s", "first_token_s", "last_token_s", "ended_s")]
    assert times == sorted(times)
    assert await metric(two.url, "vllm:external_prefix_cache_hits_total") == 192


async def test_engine_time_runs_as_fast_as_told(start):
    engine = start("--time-scale", "20")
    begin = time.monotonic()
    await ask(f"{engine.url}/v1/completions", completion([7] * 30_000))
    wall_s = time.monotonic() - begin
    engine_s = await metric(engine.url, "vllm:time_to_first_token_seconds_sum")
    assert engine_s == pytest.approx(4.18, abs=0.2)
    assert wall_s >= engine_s / 20


@pytest.mark.parametrize("by_variable", [False, True])
async def test_an_engine_with_a_key_answers_nothing_but_probes_and_metrics_without_it(
    start, monkeypatch, by_variable: bool
) -> None:
    if by_variable:
        monkeypatch.setenv("VLLM_API_KEY", "k")
    engine = start(*FAST, *(() if by_variable else ("--api-key", "old", "k")))

    async def status(path: str, **headers: str) -> int:
        async with aiohttp.ClientSession() as http, http.get(engine.url + path, headers=headers) as answer:
            return answer.status

    for path in ("/health", "/metrics", "/version"):
        assert await status(path) == 200
    for path in ("/v1/models", "/kv_event_sources"):
        assert await status(path) == 401
        assert await status(path, authorization="Bearer other") == 401
        assert await status(path, authorization="k") == 401
        assert await status(path, authorization="bearer k") == 200
    assert (await ask(f"{engine.url}/v1/chat/completions", chat()))[0::2] == (401, {"error": "Unauthorized"})

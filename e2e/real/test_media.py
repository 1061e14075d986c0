"""Conversations with pictures and sound, as vLLM hashes and caches them: the gateway knows what is cached.

vLLM's own reader, hasher and KVCacheManager stand for the engine (media_cache.py), since models
that see need torchvision, which the installed vLLM lacks. Tokens of a medium are a run of one token, as with
LLaVA and Qwen.
"""

import asyncio
import json
import os
import struct
import subprocess
import zlib
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from router_rig import A, Rig, pool
from routing_objects import head

from enginebed import install, models
from enginebed.conversations import text
from perilune_api.pool import Engine, Model
from perilune_gateway.feeds.kv_events import decode
from perilune_gateway.model import Routed
from perilune_gateway.request.openai import parse
from perilune_gateway.request.tokens import Tokenizer, media_names
from perilune_gateway.routing.router import Encode
from perilune_gateway.state.engine_blocks import EngineBlocks

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
CHAT, BLOCK = "/v1/chat/completions", 32
LOADED = "tiny"
"""The engine's model, which media_cache.py hashes."""
PLACES = {"image": "<image>", "audio": "<audio>"}
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}{{- '<' + part.type + '>' -}}{%- endif -%}
    {%- endfor -%}
    {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
MODEL = replace(
    models.QWEN,
    specials=(*models.LLAMA.specials, *PLACES.values()),
    eos=models.LLAMA.eos,
    template=TEMPLATE,
)


def words(rng, count):
    return {"type": "text", "text": text(rng, count)}


def picture(seed, size=24, mode=2):
    """Return a part with a PNG of noise. `mode`: 0 is grey, 2 coloured, 6 with transparency."""
    samples = {0: 1, 2: 3, 6: 4}[mode]
    rows = b"".join(b"\0" + Random(seed).randbytes(samples * size) for _ in range(size))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, mode, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
    data = b64encode(png + chunk(b"IEND", b"")).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def sound(seed, samples=1600, rate=16_000, channels=1, kind=1):
    """Return a part with noise as a WAV file. `kind`: 1 is PCM of 16 bits, 3 floats of 32."""
    bits = 16 if kind == 1 else 32
    if kind == 1:
        body = Random(seed).randbytes(2 * channels * samples)
    else:
        body = struct.pack(f"<{samples}f", *(Random(seed).uniform(-1, 1) for _ in range(samples)))
    align = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * align, align, bits)
    chunks = [(b"fmt ", head), (b"data", body)]
    told = b"WAVE" + b"".join(name + struct.pack("<I", len(of)) + of for name, of in chunks)
    data = b64encode(b"RIFF" + struct.pack("<I", len(told)) + told).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def medium(part):
    """Return (kind, data, tokens) of a picture or sound; None for words."""
    match part:
        case {"type": "image_url", "image_url": {"url": url}}:
            kind, data = "image", url.partition(",")[2]
        case {"type": "input_audio", "input_audio": {"data": data}}:
            kind = "audio"
        case _:
            return None
    return kind, data, 40 + zlib.crc32(data.encode()) % 300


class Session:
    """A gateway, and vLLM's cache of one engine."""

    def __init__(self, folder: Path, vllm: subprocess.Popen[str]) -> None:
        model = Model(name="m", tokenizer=str(models.write(MODEL, folder)), context_tokens=8192)
        self._tokenizer = Tokenizer(model)
        self._rig = Rig(
            pool(model=model, engine=Engine(block_size=BLOCK), endpoints=[A]), tokenizer=self._tokenizer
        )
        state = self._rig.state
        self._tokenizer.media = self.media = state.media
        self._blocks = EngineBlocks(state.index, BLOCK, store=False, media=state.media)
        self._vllm = vllm
        self._events = []
        """What the engine has announced so far."""
        self.told = True
        """Whether full blocks show where all media of the last prompt end."""

    def ask(self, messages):
        """Return (source, tokens, cached tokens) as predicted, and (tokens, cached tokens) of vLLM."""
        body = json.dumps({"model": "m", "messages": messages}).encode()
        verdict = self._rig.router.on_body(head(CHAT), body)
        if isinstance(verdict, Encode):
            tokens = asyncio.run(self._tokenizer.encode(verdict.request))
            verdict = self._rig.router.on_tokens(verdict, tokens)
        assert isinstance(verdict, Routed), verdict
        ids, told = self._engine(messages)
        events = decode(b64decode(told["events"])).events
        self._hear(events)
        self._events += events
        self._rig.finish(verdict)
        record = self._rig.record(verdict)
        return (str(record.token_source), record.prompt_tokens, record.cached_tokens), (
            len(ids),
            told["cached"],
        )

    def another(self, folder):
        """Return another gateway of the same engine, which has heard all of its events, but no request."""
        other = Session(folder, self._vllm)
        other.media.loaded(LOADED)
        other._hear(self._events)
        return other

    def forget(self):
        """Let the engine cache nothing."""
        self._told({"forget": True})

    def name_of(self, kind, data):
        """Return vLLM's name for a medium."""
        return self._told({"name": {"kind": kind, "data": data}})["name"]

    def _told(self, question):
        self._vllm.stdin.write(json.dumps(question) + "\n")
        self._vllm.stdin.flush()
        return json.loads(self._vllm.stdout.readline())

    def _hear(self, events):
        for event in events:
            self._rig.router.on_applied(self._blocks.apply(A, event, self._rig.now))

    def _engine(self, messages):
        """Return the prompt's tokens as a processor makes them, and what vLLM's cache tells of it."""
        media = [found for message in messages for part in message["content"] if (found := medium(part))]
        written = [
            message
            | {
                "content": [
                    {"type": "text", "text": PLACES[found[0]]} if (found := medium(part)) else part
                    for part in message["content"]
                ]
            }
            for message in messages
        ]
        request = parse(CHAT, json.dumps({"model": "m", "messages": written}).encode())
        places = {self._tokenizer.local.encode(place).ids[0] for place in PLACES.values()}
        ids, spans = [], []
        for token in self._tokenizer.local_ids(request):
            if token in places:
                kind, data, tokens = media[len(spans)]
                spans.append({"kind": kind, "data": data, "start": len(ids), "length": tokens})
                ids += [token] * tokens
            else:
                ids.append(token)
        ends = [span["start"] + span["length"] for span in spans]
        self.told = all(end < len(ids) // BLOCK * BLOCK for end in ends)
        return ids, self._told({"ids": ids, "media": spans})


@pytest.fixture(scope="module")
def vllm(environment, tmp_path_factory):
    script = Path(__file__).with_name("media_cache.py")
    with (
        (tmp_path_factory.mktemp("media") / "vllm.log").open("w") as log,
        subprocess.Popen(
            [environment.program("python"), str(script)],
            env=os.environ | {"PYTHONPATH": str(install.sound_library(environment))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as vllm,
    ):
        yield vllm
        vllm.stdin.close()


@pytest.fixture
def session(vllm, tmp_path):
    made = Session(tmp_path / "model", vllm)
    made.forget()
    return made


def test_conversations_with_pictures_and_sound_are_predicted_exactly(session):
    """Every second turn brings a medium. What stands before it is known, and all of it one turn later, or two
    if no full block has shown where it ends."""
    told, late = [], 0
    for number in range(8):
        rng = Random(number)
        messages = [{"role": "system", "content": [words(Random(1), 40)]}]
        for turn in range(8):
            parts = [words(rng, 30)]
            if turn % 2 == 0:
                new = sound(100 * number + turn) if turn == 2 else picture(100 * number + turn)
                parts.insert(rng.randrange(2), new)
            messages.append({"role": "user", "content": parts})
            known = session.told
            predicted, counted = session.ask(messages)
            told.append((predicted, counted))
            if turn % 2 == 0:
                assert (predicted[0], predicted[2]) == ("estimate", counted[1]), told
            elif known:
                assert predicted == ("local", *counted), told
            else:
                late += 1
                assert predicted[0] == "estimate", told
                assert predicted[2] <= counted[1], told
            messages.append({"role": "assistant", "content": [words(rng, 10)]})
    most = max(cached for _, (_, cached) in told)
    print(f"{len(told) - late} of {len(told)} turns exact, up to {most} tokens")


def test_all_media_of_a_message_are_learned_at_once(session):
    parts = [picture(1), words(Random(5), 20), sound(2), picture(3), picture(4, mode=0), picture(5, mode=6)]
    messages = [{"role": "user", "content": parts}]
    session.ask(messages)
    messages += [{"role": "assistant", "content": [words(Random(6), 4)]}]
    messages += [{"role": "user", "content": [words(Random(7), 40)]}]
    predicted, counted = session.ask(messages)
    assert predicted == ("local", *counted)
    assert counted[1] > 5 * 40


def test_another_medium_after_equal_words_is_another_prompt(session):
    for seed in (1, 2, 1, 2):
        parts = [words(Random(8), 60), picture(seed), words(Random(9), 60)]
        predicted, counted = session.ask([{"role": "user", "content": parts}])
        assert predicted[2] == counted[1]
    assert predicted == ("local", *counted)
    parts = [words(Random(8), 60), picture(3), words(Random(9), 60)]
    predicted, counted = session.ask([{"role": "user", "content": parts}])
    assert predicted[0] == "estimate"
    assert predicted[2] == counted[1] > 0


def test_another_gateway_knows_media_by_their_names(session, tmp_path):
    """Pictures of all kinds and sound, in the first prompt that it sees; of sound that engines resample it
    knows what stands before, and its health says why."""
    media = [picture(1), words(Random(5), 20), picture(2, mode=0), picture(3, mode=6), sound(4)]
    messages = [{"role": "user", "content": [*media, words(Random(6), 40)]}]
    session.ask(messages)
    other = session.another(tmp_path / "another")
    predicted, counted = other.ask(messages)
    assert predicted == ("local", *counted)
    assert counted[1] > 4 * 40
    assert {(row.kind, row.named) for row in other.media.table()} == {("image", "bytes"), ("audio", "bytes")}
    messages = [{"role": "user", "content": [*media, sound(4, rate=8_000), words(Random(6), 40)]}]
    session.ask(messages)
    third = session.another(tmp_path / "third")
    predicted, counted = third.ask(messages)
    assert predicted[0] == "estimate"
    assert 4 * 40 < predicted[2] < counted[1]
    (why,) = [row for row in third.media.table() if not row.has_name]
    print(why)
    assert (why.kind, why.named) == ("audio", "rate")


@pytest.mark.parametrize(
    ("part", "named"),
    [
        pytest.param(picture(1), "bytes", id="picture"),
        pytest.param(picture(2, mode=0), "bytes", id="grey picture"),
        pytest.param(picture(3, mode=6), "bytes", id="picture with transparency"),
        pytest.param(sound(4), "bytes", id="sound"),
        pytest.param(sound(5, samples=30_001, channels=2), "bytes", id="sound of two channels"),
        pytest.param(sound(6, kind=3), "bytes", id="sound as floats"),
    ],
)
def test_names_are_those_of_vllm(session, part, named):
    kind, data, _ = medium(part)
    ours = media_names.of(kind, data, LOADED)
    assert ours == (session.name_of(kind, data), named)

"""Conversations with pictures: once an engine has cached a picture, the gateway knows how much of later
prompts with that picture is cached there."""

import json
import struct
import zlib
from base64 import b64encode
from random import Random

import pytest
import pytest_asyncio

from enginebed import models
from enginebed.conversations import text
from enginebed.rig import Rig
from perilune_api.names import DECISION_HEADER

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]
BLOCKS = 2000
"""So many blocks that nothing is evicted."""
TURNS = 5


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seeing(environment, tmp_path_factory):
    """Yield a rig with an engine whose model sees, behind a gateway and Envoy."""
    folder = models.write(models.LLAVA, tmp_path_factory.mktemp("models") / models.LLAVA.name)
    async with Rig(tmp_path_factory.mktemp("seeing"), environment) as rig:
        rendered = rig.render(
            {
                "model": {
                    "name": "tiny",
                    "source": str(folder),
                    "contextTokens": 16384,
                    "tokenizer": str(folder),
                },
                "engine": {"args": [f"--num-gpu-blocks-override={BLOCKS}", "--load-format=dummy"]},
            }
        )
        await rig.serve(rendered)
        yield rig


def picture(seed):
    """Return a part with a PNG of noise."""
    rng, size = Random(seed), 40
    rows = b"".join(b"\0" + rng.randbytes(3 * size) for _ in range(size))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(png).decode()}"}}


async def ask(rig, messages):
    """Return what was predicted, (source, prompt, cached), and what the engine counted, (prompt, cached)."""
    body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 4})
    headers = {"content-type": "application/json", DECISION_HEADER: "yes"}
    async with rig.http.post(f"{rig.url}/v1/chat/completions", data=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        usage, decision = (await answer.json())["usage"], answer.headers[DECISION_HEADER]
    page = await rig.page(f"/api/decisions/{decision.rpartition('request=')[2]}")
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return (page["token_source"], page["prompt_tokens"], page["cached_tokens"]), (
        usage["prompt_tokens"],
        cached,
    )


async def test_a_conversation_with_pictures_is_predicted_exactly(seeing):
    """Every second turn brings a picture. What stands before it is known, and all of it one turn later."""
    told = []
    for session in range(3):
        rng, messages = Random(session), [{"role": "system", "content": text(Random(1), 40)}]
        for turn in range(TURNS):
            parts = [{"type": "text", "text": text(rng, 30)}]
            if turn % 2 == 0:
                parts.insert(rng.randrange(2), picture(100 * session + turn))
            messages.append({"role": "user", "content": parts})
            predicted, counted = await ask(seeing, messages)
            told.append((predicted, counted))
            messages.append({"role": "assistant", "content": text(rng, 10)})
            if turn % 2:  # no picture is new
                assert predicted == ("local", *counted), told
            else:
                assert predicted[2] == counted[1], told
    assert any(cached > models.PICTURE_TOKENS for _, (_, cached) in told), told
    print(told)


async def test_pictures_of_one_message_are_learned_together(seeing):
    parts = [{"type": "text", "text": text(Random(5), 20)}, *(picture(seed) for seed in (901, 902, 903))]
    messages = [{"role": "user", "content": parts}]
    await ask(seeing, messages)
    messages += [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": text(Random(6), 40)}]
    predicted, counted = await ask(seeing, messages)
    assert predicted == ("local", *counted)
    assert counted[1] > 3 * models.PICTURE_TOKENS


async def test_another_picture_after_equal_words_is_not_taken_for_the_first(seeing):
    words = {"type": "text", "text": text(Random(7), 60)}
    for seed in (911, 912):
        await ask(seeing, [{"role": "user", "content": [words, picture(seed), words]}])
    for seed in (911, 912, 913):
        predicted, (_, cached) = await ask(
            seeing, [{"role": "user", "content": [words, picture(seed), words]}]
        )
        assert predicted[2] == cached
        assert (cached > models.PICTURE_TOKENS) is (seed != 913)

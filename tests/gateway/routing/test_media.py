"""Pictures and sound: what an engine's events tell of them makes later prompts exact."""

import asyncio
import json
import struct
from base64 import b64encode
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from random import Random

import pytest
from rendering_engine import folder_with
from router_rig import USUAL, A, Rig, pool
from routing_objects import head

from perilune_api.pool import Model
from perilune_gateway.model import DecisionRecord, Routed, TokenSource
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.media_names import Named, of
from perilune_gateway.routing.router import Encode
from perilune_gateway.state.engine_blocks import EngineBlocks

SIZE, CHAT = 16, "/v1/chat/completions"
TEMPLATE = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}{{- m.content }}{%- else %}
    {%- for part in m.content %}
        {%- if part.type in ('image', 'audio', 'video') %}{{- 'PLACE' }}
        {%- elif part.type == 'text' %}{{- part.text }}{%- endif %}
    {%- endfor %}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PLACE, BARE = "<|im_start|><|endoftext|><|im_end|>", "<|endoftext|>"
"""What a template writes for a picture."""
PAD, RUN = 0, 9000
"""The template's token for a picture, and the one that the engine puts there many times."""


def picture(seed: int) -> dict[str, object]:
    data = b64encode(Random(seed).randbytes(3000)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


class Engine:
    """An engine that reads pictures, and announces what it caches."""

    def __init__(self, folder: Path, place: str) -> None:
        self._place = place
        self._template = Tokenizer(Model(name="m", tokenizer=str(folder)))
        self._names = count(1)
        self._cached: dict[tuple[object, ...], int] = {}
        self.blocks_of_a_step = 1000
        """Blocks that it prefills at once."""

    def forget(self) -> None:
        self._cached.clear()

    def prompt(self, body: bytes, pictures: list[tuple[str, int]]) -> list[tuple[int, str, int]]:
        """Return (token, identifier of its picture, the picture's begin) for each token."""
        bare = json.loads(body)
        request = parse(CHAT, json.dumps(bare).encode())
        assert isinstance(request, ParsedRequest)
        ids, at = [], 0
        for token in self._placed(bare):
            if token == PAD:
                identifier, length = pictures[at]
                at += 1
                begin = len(ids)
                ids += [(RUN, identifier, begin)] * length
            else:
                ids.append((token, "", 0))
        return ids

    def _placed(self, body: dict[str, object]) -> list[int]:
        """Return the template's tokens, by a conversation that writes its pictures as text."""
        for message in body["messages"]:
            if not isinstance(message["content"], str):
                message["content"] = "".join(part.get("text", self._place) for part in message["content"])
        request = parse(CHAT, json.dumps(body).encode())
        assert isinstance(request, ParsedRequest)
        ids = self._template.local_ids(request)
        assert ids is not None
        return [*ids]

    def serve(self, body: bytes, pictures: list[tuple[str, int]]) -> tuple[int, list[BlockStored]]:
        """Return how many tokens were cached, and the events of those that are now."""
        prompt = self.prompt(body, pictures)
        names, new, parent = [], [], None
        tokens: list[int] = []
        extra: list[object] = []
        for at in range(0, len(prompt) // SIZE * SIZE, SIZE):
            block = prompt[at : at + SIZE]
            keys = dict.fromkeys((name, begin - at) for _, name, begin in block if name)
            content = (parent, tuple(token for token, _, _ in block), tuple(keys))
            if content not in self._cached:
                self._cached[content] = next(self._names)
                new.append(self._cached[content])
                tokens += content[1]
                extra.append([["mm", *key] for key in keys] or None)
            else:
                names.append(self._cached[content])
            parent = self._cached[content]
        events, above, step = [], names[-1] if names else None, self.blocks_of_a_step
        for at in range(0, len(new), step):
            stored, of = tuple(new[at : at + step]), tuple(tokens[at * SIZE : (at + step) * SIZE])
            keys = tuple(extra[at : at + step])
            events.append(
                BlockStored(
                    block_hashes=stored,
                    parent_block_hash=above,
                    token_ids=of,
                    block_size=SIZE,
                    medium="GPU",
                    extra_keys=keys,
                )
            )
            above = stored[-1]
        return len(names) * SIZE, events


class Session:
    """A gateway and its engine."""

    def __init__(self, folder: Path, place: str = PLACE) -> None:
        folder = folder_with(folder, TEMPLATE.replace("PLACE", place))
        self.pause = 120.0
        """Seconds between two requests."""
        model = Model(name="m", tokenizer=str(folder), context_tokens=32_000)
        document = pool(model=model, engine=USUAL, endpoints=[A])
        self.engine = Engine(folder, place)
        self.tokenizer = Tokenizer(model, stopwatch=lambda: 0.0)
        self.rig = Rig(document, tokenizer=self.tokenizer)
        state = self.rig.state
        self.tokenizer.media = self.media = state.media
        self.events = list[BlockStored]()
        """What the engine has announced so far."""
        self.blocks = EngineBlocks(state.index, SIZE, store=False, media=state.media)

    def ask(
        self,
        *parts: dict[str, object],
        pictures: list[tuple[str, int]],
        more: Mapping[str, object] | None = None,
    ) -> tuple[DecisionRecord, int]:
        """Return the decision, and how many tokens the engine had cached. `more`: other fields of the
        body."""
        body, routed = self._route(*parts, more=more)
        cached, events = self.engine.serve(body, pictures)
        self.hear(events)
        self.events += events
        self.rig.finish(routed)
        self.rig.now += self.pause
        return self.rig.record(routed), cached

    def hear(self, events: Iterable[BlockStored]) -> None:
        for event in events:
            self.rig.router.on_applied(self.blocks.apply(A, event, self.rig.now))

    def refuse(self, *parts: dict[str, object]) -> None:
        self.rig.finish(self._route(*parts)[1])

    def _route(
        self, *parts: dict[str, object], more: Mapping[str, object] | None = None
    ) -> tuple[bytes, Routed]:
        asked = {"model": "m", "messages": [{"role": "user", "content": [*parts]}], **(more or {})}
        body = json.dumps(asked).encode()
        routed = self.rig.router.on_body(head(CHAT), body)
        if isinstance(routed, Encode):
            tokens = asyncio.run(self.tokenizer.encode(routed.request))
            routed = self.rig.router.on_tokens(routed, tokens)
        assert isinstance(routed, Routed), routed
        return body, routed


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


LOOK = text("look at this " * 3)


def test_a_picture_is_exact_once_the_engine_has_announced_it(session: Session) -> None:
    cat = ("cat", 70)
    session.ask(LOOK, picture(1), text("what is it? " * 9), pictures=[cat])
    record, cached = session.ask(LOOK, picture(1), text("what is it? " * 9 + "and where?"), pictures=[cat])
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 70
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [LOOK, picture(1)]}]}).encode()
    record, _ = session.ask(LOOK, picture(1), pictures=[cat])
    assert record.prompt_tokens == len(session.engine.prompt(body, [cat]))


def test_another_picture_of_the_same_size_is_another_prompt(session: Session) -> None:
    session.ask(LOOK, picture(1), text("what is it? " * 9), pictures=[("cat", 70)])
    session.ask(LOOK, picture(2), text("what is it? " * 9), pictures=[("dog", 70)])
    for number, name in ((1, "cat"), (2, "dog")):
        record, cached = session.ask(LOOK, picture(number), text("what is it? " * 9), pictures=[(name, 70)])
        assert record.cached_tokens == cached > 70
    record, cached = session.ask(LOOK, picture(3), text("what is it? " * 9), pictures=[("owl", 70)])
    assert record.token_source is TokenSource.ESTIMATE
    assert SIZE <= record.cached_tokens == cached < 70, "what stands before it"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_all_pictures_of_a_prompt_are_learned(session: Session, step: int) -> None:
    session.engine.blocks_of_a_step = step
    cat, dog, owl = ("cat", 40), ("dog", 55), ("owl", 17)
    parts = LOOK, picture(1), text("a cat " * 99), picture(2), picture(3), text("a dog and an owl " * 9)
    session.ask(*parts, pictures=[cat, dog, owl])
    record, cached = session.ask(*parts, text("so? " * 20), pictures=[cat, dog, owl])
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 17 + 40 + 55


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_picture_whose_prefill_takes_several_steps_is_learned(session: Session, step: int) -> None:
    """Wherever a step ends: the blocks that show where the picture ends may have no medium."""
    session.engine.blocks_of_a_step = step
    for number in range(SIZE):
        cat = (f"cat {number}", 90 + number)
        session.ask(LOOK, picture(number), text("what is it? " * 9), pictures=[cat])
        record, cached = session.ask(
            LOOK, picture(number), text("what is it? " * 9 + "and where?"), pictures=[cat]
        )
        assert record.token_source is TokenSource.LOCAL
        assert record.cached_tokens == cached > 90


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("place", [PLACE, BARE])
def test_pictures_side_by_side_are_told_apart(tmp_path: Path, place: str, step: int) -> None:
    """Though all of them are runs of the same token, and may share a block."""
    session = Session(tmp_path, place)
    session.engine.blocks_of_a_step = step
    names = [("cat", 40), ("dog", 5), ("owl", 4), ("fox", 33)]
    parts = picture(1), picture(2), picture(3), picture(4), text("which is it? " * 9)
    session.ask(*parts, pictures=names)
    record, cached = session.ask(*parts, pictures=names)
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 82


def test_a_picture_behind_one_that_was_seen_before_is_learned(session: Session) -> None:
    cat, dog, owl = ("cat", 40), ("dog", 55), ("owl", 17)
    session.ask(LOOK, picture(1), text("what is it? " * 9), pictures=[cat])
    parts = picture(2), picture(1), picture(2), picture(3), text("which is it? " * 9)
    session.ask(*parts, pictures=[dog, cat, dog, owl])
    record, cached = session.ask(*parts, pictures=[dog, cat, dog, owl])
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 40 + 55 + 55 + 17


def test_a_learned_picture_is_not_awaited_any_more(session: Session) -> None:
    """Else another one after equal words, a moment later, could be either."""
    session.engine.blocks_of_a_step, session.pause = 1, 1.0
    for number, name in ((1, "cat"), (2, "dog"), (1, "cat"), (2, "dog")):
        record, cached = session.ask(LOOK, picture(number), text("what is it? " * 9), pictures=[(name, 70)])
        assert record.cached_tokens == cached
    assert record.token_source is TokenSource.LOCAL
    assert cached > 70


def test_a_picture_that_ends_in_the_last_block_is_learned_when_that_becomes_full(session: Session) -> None:
    session.pause = 600.0
    cat = ("cat", 78)
    session.ask(LOOK, picture(1), pictures=[cat])
    turn = text(
        "<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>\n<|im_start|>user\n" + "where is it? " * 9
    )
    record, cached = session.ask(LOOK, picture(1), turn, pictures=[cat])
    assert record.token_source is TokenSource.ESTIMATE
    assert record.cached_tokens < cached
    record, cached = session.ask(LOOK, picture(1), turn, pictures=[cat])
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached


def test_what_the_engine_announces_of_another_prompt_is_no_picture_of_this_one(session: Session) -> None:
    """The engine has refused the prompt; later it gets another picture after equal words."""
    words = text("what is it? " * 9)
    session.ask(LOOK, picture(2), words, pictures=[("dog", 70)])
    session.refuse(LOOK, picture(1), words)
    session.engine.forget()
    session.ask(LOOK, picture(2), words, pictures=[("dog", 70)])
    record, _ = session.ask(LOOK, picture(1), words, pictures=[("cat", 70)])
    assert record.token_source is TokenSource.ESTIMATE


def test_a_picture_that_the_engine_fetches_stays_unknown(session: Session) -> None:
    there = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    for _ in range(3):
        record, _ = session.ask(LOOK, there, text("what is it? " * 9), pictures=[("cat", 70)])
        assert record.token_source is TokenSource.ESTIMATE


def test_arguments_for_media_make_other_tokens_of_a_picture(session: Session) -> None:
    small = {"mm_processor_kwargs": {"max_pixels": 100}}
    words = text("what is it? " * 9)
    for more, cat in (({}, ("cat", 70)), (small, ("small cat", 20))) * 2:
        record, cached = session.ask(LOOK, picture(1), words, pictures=[cat], more=more)
        assert record.cached_tokens == cached
    assert record.token_source is TokenSource.LOCAL


LOADED = "/models/sees"


def png(seed: int) -> tuple[dict[str, object], str]:
    """Return a part with what looks like a PNG, and the engine's name for it."""
    begins = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(9) + b"\2"
    data = b64encode(begins + Random(seed).randbytes(3000)).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return part, of("image", data, LOADED).name


def wav(seed: int, rate: int = 16_000) -> tuple[dict[str, object], str]:
    """Return a part with sound, and the engine's name for it if its model hears at this rate."""
    body = Random(seed).randbytes(2_000)
    head = struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", len(body))
    data = b64encode(b"RIFF" + struct.pack("<I", 44 + len(body)) + b"WAVE" + head + body).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return part, of("audio", data, LOADED).name


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_what_an_engine_has_announced_under_a_mediums_name_is_known(tmp_path: Path, step: int) -> None:
    """To a gateway, too, that has not seen the request that it is of."""
    for name in ("first", "late"):
        (tmp_path / name).mkdir()
    session, late = Session(tmp_path / "first", BARE), Session(tmp_path / "late", BARE)
    session.engine.blocks_of_a_step = step
    (cat, cats_name), (dog, dogs_name), (bark, barks_name) = png(1), png(2), wav(3)
    pictures = [(cats_name, 70), (dogs_name, 33), (barks_name, 20)]
    prompt = LOOK, cat, text("what is it? " * 9), dog, bark, text("and this? " * 9)
    session.ask(*prompt, pictures=pictures)
    late.engine = session.engine
    late.media.loaded(LOADED)
    late.hear(session.events)
    record, cached = late.ask(*prompt, pictures=pictures)
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 70 + 33 + 20


def test_names_tell_pictures_apart_that_are_awaited_at_the_same_time(session: Session) -> None:
    session.pause = 1.0
    session.media.loaded(LOADED)
    (cat, cats_name), (dog, dogs_name), (owl, owls_name) = png(1), png(2), png(3)
    words = text("what is it? " * 9)
    session.ask(LOOK, cat, words, pictures=[(cats_name, 70)])
    session.refuse(LOOK, dog, words)
    session.ask(LOOK, owl, words, pictures=[(owls_name, 70)])
    record, cached = session.ask(LOOK, owl, words, pictures=[(owls_name, 70)])
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 70
    record, cached = session.ask(LOOK, dog, words, pictures=[(dogs_name, 70)])
    assert record.token_source is TokenSource.ESTIMATE
    assert record.cached_tokens == cached


def test_a_name_that_no_engine_gives_changes_nothing(session: Session) -> None:
    session.media.loaded(LOADED)
    cat, _ = png(1)
    session.ask(LOOK, cat, text("what is it? " * 9), pictures=[("cat", 70)])
    record, cached = session.ask(LOOK, cat, text("what is it? " * 9), pictures=[("cat", 70)])
    assert record.token_source is TokenSource.LOCAL
    assert record.cached_tokens == cached > 70


def test_sound_that_engines_resample_is_learned_though_pictures_have_their_names(session: Session) -> None:
    """Also sound whose name would be right for nearly all models, but is not for this one."""
    session.media.loaded(LOADED)
    (cat, cats_name), (bark, _), (other, _) = png(1), wav(2), wav(3, rate=8_000)
    words = text("what is it? " * 9)
    for _ in range(2):
        session.ask(LOOK, cat, words, pictures=[(cats_name, 70)])
    for sound, name in ((bark, "bark"), (other, "howl")):
        session.ask(LOOK, sound, words, pictures=[(name, 70)])
        record, cached = session.ask(LOOK, sound, words, pictures=[(name, 70)])
        assert record.token_source is TokenSource.LOCAL
        assert record.cached_tokens == cached > 70


MP3 = {
    "type": "input_audio",
    "input_audio": {"data": b64encode(b"ID3" + bytes(99)).decode(), "format": "mp3"},
}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
FETCHED = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


@pytest.mark.parametrize(
    ("part", "more", "row"),
    [
        pytest.param(png(1)[0], {}, ("image", Named.BYTES, True), id="a picture"),
        pytest.param(wav(1)[0], {}, ("audio", Named.BYTES, True), id="sound"),
        pytest.param(png(1)[0] | {"uuid": "cat"}, {}, ("image", Named.CLIENT, True), id="the client's name"),
        pytest.param(MP3, {}, ("audio", Named.FORMAT, False), id="compressed sound"),
        pytest.param(wav(1, 8_000)[0], {}, ("audio", Named.RATE, False), id="sound of another rate"),
        pytest.param(VIDEO, {}, ("video", Named.VIDEO, False), id="video"),
        pytest.param(FETCHED, {}, ("image", Named.FETCHED, False), id="what the engine fetches"),
        pytest.param(
            png(1)[0],
            {"media_io_kwargs": {"image": {}}},
            ("image", Named.ARGUMENTS, False),
            id="arguments for media",
        ),
        pytest.param(
            {"type": "image_embeds", "image_embeds": "AAAA"},
            {},
            ("any", Named.UNPLACED, False),
            id="what has no place in the template",
        ),
    ],
)
def test_health_says_what_has_no_name(
    session: Session, part: dict[str, object], more: dict[str, object], row: tuple[str, Named, bool]
) -> None:
    assert session.media.table() == ()
    session.media.loaded(LOADED)
    session.ask(LOOK, part, pictures=[("cat", 70)], more=more)
    (told,) = session.media.table()
    assert (told.kind, told.named, told.has_name) == row
    assert told.parts == 1
    assert told.says


def test_before_an_engine_has_told_its_model_nothing_has_a_name(session: Session) -> None:
    session.ask(LOOK, png(1)[0], pictures=[("cat", 70)])
    (told,) = session.media.table()
    assert told.named is Named.MODEL

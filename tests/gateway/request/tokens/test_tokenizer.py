"""Tokens of requests: given, by a local tokenizer, by an estimate; and what happens when one cannot tell."""

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_requests import CHAT, COMPLETIONS, HALF_EMOJI, HI, MESSAGES, PICTURE, RESPONSES, request

from perilune_api.pool import Model, SpecError
from perilune_gateway.model import Tokens, TokenSource
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.causes import Cause
from perilune_gateway.request.tokens.prompts import MEDIA_TOKENS, size_bytes


@pytest.mark.parametrize("mode", ["auto", "engine", "estimate"])
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        pytest.param([5, 6], Tokens(count=2, source=TokenSource.GIVEN, ids=[5, 6]), id="ids"),
        pytest.param(
            [[5, 6], [7, 8, 9]],
            Tokens(count=5, source=TokenSource.GIVEN, ids=[5, 6], longest=3),
            id="the first list's ids, everyone's count, the longest's length",
        ),
        pytest.param([], Tokens(count=0, source=TokenSource.GIVEN, ids=[]), id="none"),
    ],
)
async def test_given_ids_are_taken_whatever_the_mode(mode, prompt, tokens):
    tokenizer = Tokenizer(Model(name="m", tokenize=mode), lambda among: "127.0.0.1:1")
    asked = request(COMPLETIONS, prompt=prompt)
    assert tokenizer.now(asked) == tokens
    assert await tokenizer.encode(asked) == tokens
    assert tokenizer.counts == {TokenSource.GIVEN: 2}
    await tokenizer.close()


async def test_a_small_chat_is_encoded_at_once(tokenizer, reference):
    tokens = tokenizer.now(request(CHAT, messages=HI))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(tokens.ids) == reference.encode(text, add_special_tokens=False).ids
    assert tokens.ids[0] == reference.token_to_id("<|im_start|>")
    assert (tokens.count, tokens.source) == (len(tokens.ids), TokenSource.LOCAL)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        pytest.param(
            CHAT,
            {"messages": HI, "tools": [{"function": {"name": "f"}}]},
            "1<|im_start|>assistant\n",
            id="tools",
        ),
        pytest.param(CHAT, {"messages": HI, "add_generation_prompt": False}, "", id="no generation prompt"),
        pytest.param(RESPONSES, {"input": "hi"}, "<|im_start|>assistant\n", id="responses"),
        pytest.param(MESSAGES, {"messages": HI}, "<|im_start|>assistant\n", id="Anthropic"),
    ],
)
async def test_every_api_goes_through_the_template(path, body, text, tokenizer, reference):
    tokens = tokenizer.now(request(path, **body))
    rendered = reference.decode(tokens.ids, skip_special_tokens=False).removeprefix("<|endoftext|>")
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n" + text


@pytest.mark.parametrize(
    ("path", "body", "begins"),
    [
        pytest.param(COMPLETIONS, {"prompt": "hi"}, True, id="completions: yes"),
        pytest.param(
            COMPLETIONS, {"prompt": "hi", "add_special_tokens": False}, False, id="unless told not to"
        ),
        pytest.param(CHAT, {"messages": HI}, False, id="chat: no"),
        pytest.param(MESSAGES, {"messages": HI}, False, id="Anthropic: no"),
        pytest.param(RESPONSES, {"input": "hi"}, True, id="responses: yes"),
        pytest.param(CHAT, {"messages": HI, "add_special_tokens": True}, True, id="unless told to"),
    ],
)
async def test_special_tokens_before_the_prompt(path, body, begins, tokenizer):
    assert (tokenizer.now(request(path, **body)).ids[0] == 0) is begins


async def test_several_texts_count_together(tokenizer):
    tokens = tokenizer.now(request(COMPLETIONS, prompt=["hi", "the user", ""]))
    singles = [tokenizer.now(request(COMPLETIONS, prompt=text)) for text in ("hi", "the user", "")]
    assert tokens.ids == singles[0].ids
    assert tokens.count == sum(single.count for single in singles)


async def test_a_long_text_waits_for_a_thread(tokenizer, reference):
    messages = [{"role": "user", "content": "the user said hi " * 4000}]
    asked = request(CHAT, messages=messages)
    assert tokenizer.now(asked) is None
    tokens = await tokenizer.encode(asked)
    assert tokens.source is TokenSource.LOCAL
    assert reference.decode(tokens.ids).count("the user said hi ") == 4000
    assert tokenizer.counts == {TokenSource.LOCAL: 1}


async def test_what_is_long_is_measured(folder):
    ticks = iter(range(1000))
    tokenizer = Tokenizer(
        Model(name="m", tokenizer=str(folder)), stopwatch=lambda: next(ticks) * 0.001
    )  # 1 ms a look
    text = "hi " * 600
    before = tokenizer.us_per_char
    assert tokenizer.now(request(COMPLETIONS, prompt="hi")) is not None
    assert tokenizer.us_per_char == before, "a short text measures the call"
    assert tokenizer.now(request(COMPLETIONS, prompt=text)) is not None
    assert tokenizer.us_per_char == pytest.approx(0.9 * before + 0.1 * 1000 / len(text))
    for _ in range(30):
        await tokenizer.encode(request(COMPLETIONS, prompt=text))
    assert tokenizer.us_per_char == pytest.approx(1000 / len(text), rel=0.05)
    assert tokenizer.now(request(COMPLETIONS, prompt=text * 2)) is None
    await tokenizer.close()


@pytest.fixture(scope="module")
def shared(folder) -> Tokenizer:
    """One tokenizer for all examples of a property; it only answers at once and so starts no thread."""
    return Tokenizer(Model(name="m", tokenizer=str(folder)), stopwatch=lambda: 0.0)


@given(text=st.text(max_size=60))
def test_decoding_the_ids_of_a_text_gives_the_text(text, reference, shared):
    ids = shared.now(request(COMPLETIONS, prompt=text, add_special_tokens=False)).ids
    assert reference.decode(ids, skip_special_tokens=False) == text


@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_messages_keep_their_order(texts, reference, shared):
    messages = [{"role": "user", "content": text} for text in texts]
    ids = shared.now(request(CHAT, messages=messages, add_generation_prompt=False)).ids
    told = reference.decode(ids, skip_special_tokens=False)
    assert told == "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["role", "user", "content", "text", "type"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner)
    ),
)


@given(path=st.sampled_from([CHAT, RESPONSES, MESSAGES]), messages=st.lists(JSON, max_size=4))
def test_any_conversation_has_tokens(path, messages, shared):
    assert shared.now(request(path, messages=messages, input=messages)).count >= 1


@pytest.mark.parametrize(
    ("path", "body", "cause", "count"),
    [
        pytest.param(
            CHAT,
            {"messages": [{"role": "pirate", "content": "arr"}]},
            Cause.TEMPLATE,
            10,
            id="refused by the template",
        ),
        pytest.param(CHAT, {"messages": [{"content": "x"}]}, Cause.CONVERSATION, 5, id="no role"),
        pytest.param(CHAT, {"messages": HI, "chat_template": "x"}, Cause.OWN_TEMPLATE, 9, id="own template"),
        pytest.param(
            RESPONSES,
            {"input": "hi", "previous_response_id": "r"},
            Cause.STORED_CONVERSATION,
            1,
            id="stored conversation",
        ),
        pytest.param(COMPLETIONS, {"prompt_embeds": "AAAA"}, Cause.NO_TEXT, 1, id="embeddings"),
        pytest.param(
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": HALF_EMOJI}]}]},
            Cause.TOKENIZER,
            27,
            id="half an emoji in an argument",
        ),
    ],
)
async def test_what_cannot_be_encoded_is_estimated(path, body, cause, count, tokenizer, caplog):
    asked = request(path, **body)
    with caplog.at_level(logging.WARNING):
        for tokens in (tokenizer.now(asked), await tokenizer.encode(asked), tokenizer.now(asked)):
            assert tokens == Tokens(count=count, source=TokenSource.ESTIMATE)
    assert tokenizer.causes == {cause: 3}
    assert tokenizer.counts == {TokenSource.ESTIMATE: 3}
    assert len(caplog.records) == 1
    assert f"cause={cause}" in caplog.text


@pytest.mark.parametrize("mode", ["local", "estimate"])
async def test_a_picture_is_not_counted_by_its_bytes(mode, folder):
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder), tokenize=mode))
    asked = request(
        CHAT, messages=[{"role": "user", "content": [PICTURE, {"type": "text", "text": "hi " * 100}]}]
    )
    tokens = await tokenizer.encode(asked)
    assert tokens.source is TokenSource.ESTIMATE
    assert MEDIA_TOKENS + 300 / 4 < tokens.count < MEDIA_TOKENS + 500 / 4
    assert tokenizer.causes == {Cause.MEDIA: 1}
    await tokenizer.close()


@pytest.mark.parametrize(
    ("data", "causes"),
    [
        pytest.param("iVBOR/w0+=" * 2_000, {Cause.MEDIA: 1}, id="a picture"),
        pytest.param("iVBOR\\/w0" * 2_000, {Cause.MEDIA: 1}, id="with slashes as some write them"),
        pytest.param("not base64, but words. " * 1_000, {}, id="text that speaks of it"),
    ],
)
def test_a_picture_in_a_long_text_is_found(data, causes):
    tokenizer = Tokenizer(Model(name="m", tokenize="estimate"))
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [
        {"type": "text", "text": "some words " * 2_000},
        url if causes else {"type": "text", "text": data},
    ]
    assert tokenizer.now(request(CHAT, messages=[{"role": "user", "content": content}]))
    assert tokenizer.causes == causes


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        pytest.param(COMPLETIONS, {"prompt": "x" * 400}, 160, id="text"),
        pytest.param(COMPLETIONS, {"prompt": ["é" * 100, "x" * 200]}, 160, id="texts, in bytes"),
        pytest.param(COMPLETIONS, {"prompt": ""}, 1, id="nothing"),
        pytest.param(
            CHAT, {"messages": [{"role": "user", "content": "x" * 365}]}, 160, id="chat, as written"
        ),
        pytest.param(MESSAGES, {"messages": [], "system": "x" * 396}, 160, id="system counts"),
        pytest.param(CHAT, {"messages": [], "tools": [{"x": "x" * 387}]}, 160, id="tools count"),
    ],
)
async def test_an_estimate_counts_bytes(path, body, count):
    tokenizer = Tokenizer(
        Model(name="m", tokenize="estimate", bytes_per_token=2.5), lambda among: "127.0.0.1:1"
    )
    asked = request(path, **body)
    assert tokenizer.now(asked) == Tokens(count=count, source=TokenSource.ESTIMATE)
    assert await tokenizer.encode(asked) == Tokens(count=count, source=TokenSource.ESTIMATE)
    assert not tokenizer.causes
    await tokenizer.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, {"prompt": "a" * 1_601}, id="a text without a space"),
        pytest.param(COMPLETIONS, {"prompt": ["a " * 801]}, id="texts"),
        pytest.param(CHAT, {"messages": HI, "tools": [{"a": [[[{}]]]}] * 1_200}, id="lists"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": "a" * 17_000}]}, id="a message"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "engine", "estimate"])
async def test_nobody_looks_at_what_no_context_holds(mode, path, body, folder):
    local = str(folder) if mode == "auto" else ""
    tokenizer = Tokenizer(
        Model(name="m", tokenizer=local, tokenize=mode, context_tokens=100), lambda among: ""
    )
    asked = request(path, **body)
    estimate = Tokens(count=math.ceil(size_bytes(asked) / 4), source=TokenSource.ESTIMATE)
    assert tokenizer.now(asked) == estimate
    assert await tokenizer.encode(asked) == estimate
    assert tokenizer.causes == {Cause.TOO_MUCH: 2}, "and nothing else was tried"
    await tokenizer.close()


async def test_pictures_may_be_of_any_size(folder):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    content = [{"type": "text", "text": "what is this?"}, picture]
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder), context_tokens=2_000))
    tokens = await tokenizer.encode(request(CHAT, messages=[{"role": "user", "content": content}]))
    assert tokens.count < MEDIA_TOKENS + 100
    assert tokenizer.causes == {Cause.MEDIA: 1}
    await tokenizer.close()


async def test_a_template_that_wants_what_we_do_not_know_is_estimated(folder, tmp_path, caplog):
    """It compiles, and only fails on what it is given: the engine may know more."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ newest_function(messages) }}")
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(tmp_path)))
    for _ in range(2):
        assert tokenizer.now(request(CHAT, messages=HI)).source is TokenSource.ESTIMATE
    assert tokenizer.causes == {Cause.TEMPLATE: 2}
    assert caplog.text.count("'newest_function' is undefined") == 1, "said once"
    await tokenizer.close()


async def test_a_panic_of_the_library_costs_one_request_its_tokens(folder, monkeypatch):
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)))

    def panic(text, special=False):
        raise BaseException("panicked at src/lib.rs")

    monkeypatch.setattr(tokenizer.local, "encode", panic)
    assert tokenizer.now(request(CHAT, messages=HI)).source is TokenSource.ESTIMATE
    assert (await tokenizer.encode(request(CHAT, messages=HI))).source is TokenSource.ESTIMATE
    assert tokenizer.causes == {Cause.TOKENIZER: 2}
    monkeypatch.undo()
    assert tokenizer.now(request(CHAT, messages=HI)).source is TokenSource.LOCAL
    await tokenizer.close()


async def test_a_conversation_that_goes_on_is_encoded_from_there(tokenizer, reference):
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "the user said " * 40} for i in range(20)
    ]
    for n in range(1, 20):
        tokens = await tokenizer.encode(request(CHAT, messages=turns[:n]))
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns[:n])
        text += "<|im_start|>assistant\n"
        assert list(tokens.ids) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.local.hits >= 10
    assert tokenizer.local.kept_tokens > 2 * tokenizer.local.encoded_tokens


def broken(path):
    (path / "tokenizer.json").write_text("{}")
    return path


def bad_template(path, folder):
    (path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (path / "chat_template.jinja").write_text("{% if %}")
    return path


def unknown_filter(path, folder):
    (path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (path / "chat_template.jinja").write_text("{{ messages | newest_filter }}")
    return path


def not_text(path):
    (path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(unknown_filter, "TemplateAssertionError: No filter named 'newest_filter'", id="filter"),
        pytest.param(lambda path, _: not_text(path), "does not load: .*codec can't decode", id="no text"),
        pytest.param(
            lambda path, _: path / "nowhere", "There is no .*nowhere/tokenizer.json: name the", id="no folder"
        ),
        pytest.param(lambda path, _: path, "There is no .*leave it empty", id="empty folder"),
        pytest.param(lambda path, _: broken(path), "does not load", id="broken file"),
        pytest.param(bad_template, "does not load: TemplateSyntaxError", id="broken template"),
        pytest.param(lambda *_: "", "needs the folder", id="local without folder"),
    ],
)
def test_a_tokenizer_that_is_not_there(make, message, tmp_path, folder):
    model = Model(name="m", tokenizer=str(make(tmp_path, folder)), tokenize="local")
    with pytest.raises(SpecError, match=message + r"(.|\n)*at `\$\.spec\.model\.tokenizer`"):
        Tokenizer(model)


@pytest.mark.parametrize("mode", ["engine", "estimate"])
def test_a_tokenizer_that_is_not_used_need_not_be_there(mode):
    Tokenizer(Model(name="m", tokenizer="/nowhere", tokenize=mode))


WORDS = {"messages": [{"role": "user", "content": "the user said hi to the assistant " * 4}]}


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        pytest.param(CHAT, {"truncate_prompt_tokens": 5}, slice(-5, None), id="its end"),
        pytest.param(
            CHAT,
            {"truncate_prompt_tokens": 5, "truncation_side": "left"},
            slice(-5, None),
            id="its end, said aloud",
        ),
        pytest.param(
            CHAT, {"truncate_prompt_tokens": 5, "truncation_side": "right"}, slice(5), id="its beginning"
        ),
        pytest.param(CHAT, {"truncate_prompt_tokens": 4000}, slice(None), id="all of a short one"),
        pytest.param(
            CHAT,
            {"truncate_prompt_tokens": -1, "max_tokens": 1},
            slice(-15, None),
            id="what the context holds beside an answer",
        ),
        pytest.param(CHAT, {"truncate_prompt_tokens": -1}, slice(-16, None), id="what the context holds"),
        pytest.param(CHAT, {"truncate_prompt_tokens": None}, slice(None), id="all, by null"),
        pytest.param(RESPONSES, {"truncation": "disabled"}, slice(None), id="responses: all"),
    ],
)
async def test_a_prompt_is_cut_where_its_request_says_so(path, body, kept, folder):
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder), context_tokens=16), stopwatch=lambda: 0.0)
    words = WORDS if path == CHAT else {"input": WORDS["messages"]}
    whole = tokenizer.local_ids(request(path, **words))
    assert len(whole) > 16
    tokens = tokenizer.now(request(path, **words, **body))
    assert [*tokens.ids] == [*whole[kept]]
    assert tokens.count == len(tokens.ids)
    await tokenizer.close()


@pytest.mark.parametrize(
    ("body", "most"),
    [({"truncation": "auto", "max_output_tokens": 9}, 15), ({"truncation": None}, 16)],
)
async def test_a_response_is_made_of_what_the_context_holds(body, most, folder):
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder), context_tokens=16), stopwatch=lambda: 0.0)
    whole = [*tokenizer.local_ids(request(RESPONSES, input=WORDS["messages"]))]
    tokens = tokenizer.now(request(RESPONSES, input=WORDS["messages"], **body))
    assert [*tokens.ids] == [whole[0], *whole[1 - most :]], "with what stands before every text"
    await tokenizer.close()


async def test_given_and_several_prompts_are_cut_one_by_one(tokenizer):
    cut = {"truncate_prompt_tokens": 2}
    tokens = tokenizer.now(request(COMPLETIONS, prompt=[[5, 6, 7], [8], [9, 1, 2]], **cut))
    assert (tokens.count, [*tokens.ids], tokens.longest) == (5, [6, 7], 2)


async def test_what_stands_before_every_text_stays_unless_the_request_names_a_side(tokenizer):
    whole = [*tokenizer.local_ids(request(COMPLETIONS, prompt="the user said hi"))]
    asked = {"prompt": ["the user said hi", "the"], "truncate_prompt_tokens": 2}
    assert [*tokenizer.now(request(COMPLETIONS, **asked)).ids] == [whole[0], whole[-1]]
    assert [*tokenizer.now(request(COMPLETIONS, **asked, truncation_side="left")).ids] == whole[-2:]
    assert [*tokenizer.now(request(COMPLETIONS, **asked, truncation_side="right")).ids] == whole[:2]


async def test_an_estimate_is_no_longer_than_what_the_engine_keeps():
    tokenizer = Tokenizer(Model(name="m", tokenize="estimate"))
    assert tokenizer.now(request(CHAT, **WORDS, truncate_prompt_tokens=5)).count == 5
    await tokenizer.close()

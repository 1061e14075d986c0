"""Loads a folder's tokenizer.json as an `Encoder`; uses the faster library, fastokens, if its ids are equal.

1. Load the file with `tokenizers`, which the engines use too. It is the reference.
2. Load it with fastokens, and encode a fixed corpus with both: prose, code, runs of white space, scripts and
   emoji, bytes read as text, the model's own added tokens and look-alikes of them.
3. If all ids are equal, use fastokens and drop the reference. After any difference or error use the
   reference.
4. Find out which ids the post-processor puts around a text, and where texts may be cut (cuts.py).

Loading takes 20–60 ms besides the two loads, since fastokens compiles its patterns at the first call.
Encoding takes fastokens 2 ns a byte for words that it has seen and 40 for others, and tokenizers 250–350 ns.
fastokens keeps up to about 250 MiB of words, and needs 48 bytes of memory for each byte of the longest text
(`prompts.too_much` limits that). Both release the GIL. The self-test is a sample, not a proof; the parity
check compares hashes with those of the engines all the time.
"""

import hashlib
import json
import logging
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from perilune_gateway.request.tokens.cuts import Cuts, cuts_of

log = logging.getLogger(__name__)

Ids: TypeAlias = "array[int]"
"""Token ids, as an array of typecode "I"."""

MAX_TESTED_TOKENS = 400
"""Number of added tokens that the self-test writes. Some models have thousands of similar ones."""


class Library(StrEnum):
    """The library that encodes; also a metric label and a log field."""

    FASTOKENS = "fastokens"
    TOKENIZERS = "tokenizers"


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Encoder:
    """One model's tokenizer."""

    library: Library
    why: str
    """Why the library is not fastokens; empty when it is."""
    plain: Callable[[str], Ids]
    """Ids of a text, without special tokens around it. Raises what the library raises, including Rust panics,
    which are not Exceptions, and UnicodeEncodeError for half a surrogate pair."""
    around: tuple[Ids, Ids] | None
    """Ids that `add_special_tokens` puts before and after a text; None when it does something else."""
    special: Callable[[str], Ids]
    """Ids of a text with those that `add_special_tokens` adds. Raises as `plain` does."""
    cuts: Cuts


_in_use: WeakValueDictionary[bytes, Encoder] = WeakValueDictionary()


def load(folder: Path, template: str = "") -> Encoder:
    """Return the folder's tokenizer: the same one for all pools that have equal files. `template` is the
    source of its chat template, for the choice of cut tokens.

    Raises OSError, ValueError, and Exception itself for a file that tokenizers cannot read.
    """
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    key = hashlib.sha256(f"{len(template)} {template}{text}".encode()).digest()
    return _in_use.get(key) or _in_use.setdefault(key, of(text, template))


def of(text: str, template: str = "") -> Encoder:
    """Return the tokenizer that the text of a tokenizer.json describes. Raises as `load` does."""
    spec = json.loads(text)
    if not isinstance(spec, dict):
        raise ValueError("tokenizer.json is not a JSON object")
    reference = _reference(text)
    encode, library, why = reference, Library.TOKENIZERS, ""
    fast = _fast(text)
    if isinstance(fast, str):
        why = fast
    elif not (why := _first_difference(reference, fast, corpus(spec))):
        encode, library = fast, Library.FASTOKENS
    log.info("tokenizer library=%s%s", library, f" why={why}" if why else "")
    return Encoder(
        library=library,
        why=why,
        plain=lambda prompt: encode(prompt, False),
        around=_around(encode),
        special=lambda prompt: encode(prompt, True),
        cuts=cuts_of(spec, template),
    )


_Encode = Callable[[str, bool], Ids]
"""(text, whether to add special tokens) → token ids."""


def _reference(text: str) -> _Encode:
    from tokenizers import Tokenizer  # here, so that a gateway without a local tokenizer starts sooner

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(prompt: str, special: bool) -> Ids:
        return array("I", tokenizer.encode_batch_fast([prompt], add_special_tokens=special)[0].ids)

    return encode


def _fast(text: str) -> _Encode | str:
    """Return fastokens' encoder, or the reason why it cannot be used."""
    try:
        from fastokens import Tokenizer  # type: ignore[import-untyped]
    except ImportError as error:
        return f"not installed: {error}"
    try:
        tokenizer = Tokenizer.from_json_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust's panics are not Exceptions
        return f"does not load: {error}"

    def encode(prompt: str, special: bool) -> Ids:
        flat, _ = tokenizer.encode_batch_flat([prompt], add_special_tokens=special)
        return array("I", flat)

    return encode


def _first_difference(reference: _Encode, fast: _Encode, texts: Sequence[str]) -> str:
    """Return the first difference between the two encoders, in words; empty when there is none."""
    for text in texts:
        for special in (False, True):
            expected = reference(text, special)
            try:
                ids = fast(text, special)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                return f"fails on {text[:40]!r}: {error}"
            if ids != expected:
                at = next(
                    (i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), 0
                )
                return f"other ids for {text[:40]!r}, from token {at}"
    return ""


def _around(encode: _Encode) -> tuple[Ids, Ids] | None:
    """Return the ids that the post-processor puts before and after a text, if they are equal for three
    texts."""
    found = {_wrapping(encode(text, False), encode(text, True)) for text in ("hello", "a b", "\n1")}
    only = found.pop()
    if found or only is None:
        return None
    return array("I", only[0]), array("I", only[1])


def _wrapping(inner: Ids, outer: Ids) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ids before and after `inner` in `outer`; None unless `inner` occurs exactly once."""
    n = len(inner)
    at = [i for i in range(len(outer) - n + 1) if outer[i : i + n] == inner]
    return (tuple(outer[: at[0]]), tuple(outer[at[0] + n :])) if len(at) == 1 else None


# The self-test's texts.

_PROSE = """\
It's the reader's turn: they'll say "I'd rather not", won't they? We've 1,234.56 reasons, 100% of 2³ – and
THAT'S NOT ALL, he’s “quoted” — naïve café, Straße, ǅ, ﬁ, Ⅷ, ½.
e\u0301 vs é; A\u030a, o\u0308\u0304, q\u0323\u0307.
"""
_CODE = """\
def f(x: int = 0x_FF) -> dict[str, list[int]]:\n\treturn {"a\\n": [*range(10**3)]}  # TODO(b/12): fix\n\n\n
  if (a&&b||!c) { return x?.y ?? z[0]->w::<T>(); }\r\n\r\n/* <div class="x">&nbsp;</div> */  $HOME/../.env
{"id":"call_9aF","arguments":"{\\"path\\": \\"/usr/lib\\"}"}\n```json\n[1.0e-9, null, true]\n```
@@ -1,7 +1,9 @@
"""
_SCRIPTS = """\
漢字かな交じり文。カタカナ、ﾊﾝｶｸ。한국어 문장입니다. 中文,全角！
Ελληνικά Русский язык עברית العربية ١٢٣ हिन्दी ไทย
👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ \u200b\u200d\ufeff\u00ad\u2028\u2029\u0085 𝔘𝔫𝔦 𐍈 \U0010ffff \ufffd
"""


def corpus(spec: dict[str, Any]) -> list[str]:
    """Return the texts of the self-test. They depend on the tokenizer.json alone."""
    rng = random.Random(0)
    raw = rng.randbytes(4096)
    runs = "".join(rng.choice(" \t\n\r\u00a0\u3000a1.") * rng.randrange(1, 40) for _ in range(200))
    points = "".join(
        chr(point) for _ in range(2000) if not 0xD800 <= (point := rng.randrange(1, 0x11000)) < 0xE000
    )
    words = " ".join(
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(1, 14))) for _ in range(600)
    )
    return [
        "", " ", "a", " a", "\n", "  \n", *("x" * n for n in (31, 32, 33, 500)),
        _PROSE, _CODE, _SCRIPTS, _PROSE + _CODE + _SCRIPTS, _PROSE.upper(), words, runs, points,
        raw.decode("latin-1"), raw.decode("utf-8", "replace"), "".join(map(chr, range(0x250))),
        *_added(spec),
    ]  # fmt: skip


def _added(spec: dict[str, Any]) -> Iterator[str]:
    """Yield texts of the model's added tokens: alone, within text, side by side, and slightly changed."""
    tokens = [token["content"] for token in spec.get("added_tokens") or ()][:MAX_TESTED_TOKENS]
    if not tokens:
        return
    yield "".join(tokens)
    yield " ".join(tokens)
    yield "".join(f"{token}it's  {token}\n\n{token} \t{token}é" for token in tokens)
    yield " ".join(
        f"{token[:-1]} {token[1:]} {token.upper()} {token[0]}{token}{token[-1]}" for token in tokens if token
    )

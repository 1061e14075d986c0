"""Finds where a text may be cut so that the token ids of its parts, joined, are those of the whole text.

A tokenizer.json first splits a text at its added tokens and encodes each piece separately; it normalizes,
pre-tokenizes and merges within the pieces. So a text may be cut before an added token if that token is
matched there whatever is around it. A *cut token* is an added token for which that is certain:

- It is matched in the raw text: `normalized` is false, or the tokenizer has no normalizer.
- It does not depend on its neighbours (no `lstrip`, `rstrip`, `single_word`), and no other added token
  depends on it, since it begins and ends with ASCII punctuation other than `_`.
- No other added token contains it or overlaps with it, and it does not overlap with itself. Matches are
  searched from the left, the longest first, so a token that overlaps could hide it.

The part after a cut begins with the cut token, so none of its pieces is taken for the beginning of a text,
which some pre-tokenizers mark. Texts of random tokenizers (`dropout`) and of models other than BPE and
Unigram are never cut.

Pure functions; O(added tokens × MAX_CUT_TOKENS), once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import punctuation
from typing import Any

MAX_CUT_TOKENS = 6
"""This many are enough, because every message of a chat begins or ends with one of a few tokens."""
_EDGES = frozenset(punctuation) - {"_"}


@dataclass(frozen=True, slots=True)
class Cuts:
    """A tokenizer's cut tokens in UTF-8, or the reason why there are none."""

    tokens: tuple[bytes, ...]
    why_none: str = ""

    def last(self, text: bytes, start: int, end: int) -> int:
        """Return the position in `text` where the last cut token in `text[start:end]` begins; -1 when there
        is none."""
        return max((text.rfind(token, start, end) for token in self.tokens), default=-1)

    def token_at(self, text: bytes, at: int) -> bytes:
        """Return the cut token that begins at that position."""
        return next(token for token in self.tokens if text.startswith(token, at))

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens), default=0)


def cuts_of(spec: Mapping[str, Any], template: str = "") -> Cuts:
    """Cut tokens of a tokenizer.json. Tokens that the chat template writes come first."""
    if why := _never(spec):
        return Cuts((), why)
    added = [token for token in spec.get("added_tokens") or () if token.get("content")]
    contents = [str(token["content"]) for token in added]
    plain_text = _is_nothing(spec.get("normalizer"))
    candidates = [str(token["content"]) for token in added if _stands_alone(token, plain_text)]
    # Tokens of the template come first, then special ones; the sort is stable.
    special = {str(token["content"]) for token in added if token.get("special")}
    candidates.sort(key=lambda content: (content not in template, content not in special))
    chosen: list[bytes] = []
    for content in candidates:
        if not any(_overlap(content, other) for other in contents if other != content) and not _border(
            content, content
        ):
            chosen.append(content.encode())
        if len(chosen) == MAX_CUT_TOKENS:
            break
    return Cuts(tuple(chosen), "" if chosen else "no added token stands for itself in any text")


def _never(spec: Mapping[str, Any]) -> str:
    model = spec.get("model") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else "")
    if kind not in ("BPE", "Unigram"):
        return f"model {kind or 'of unknown type'}"
    return "BPE with dropout" if model.get("dropout") else ""


def _is_nothing(normalizer: Mapping[str, Any] | None) -> bool:
    return normalizer is None or (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers"))


def _stands_alone(token: Mapping[str, Any], plain_text: bool) -> bool:
    content = str(token["content"])
    if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
        return False
    if token.get("normalized", True) and not plain_text:
        return False
    return content[0] in _EDGES and content[-1] in _EDGES


def _overlap(a: str, b: str) -> bool:
    """Return whether occurrences of two different tokens can share characters in some text."""
    return a in b or b in a or _border(a, b) or _border(b, a)


def _border(a: str, b: str) -> bool:
    """Return whether `a` ends with characters, fewer than all, that `b` begins with."""
    return any(b.startswith(a[i:]) for i in range(1, len(a)))

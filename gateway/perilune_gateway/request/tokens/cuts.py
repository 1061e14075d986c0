"""Where a text may be cut so that its parts' token ids, put together, are those of the whole.

A tokenizer.json first splits a text at its added tokens and encodes each piece by itself; only then does it
normalize, pre-tokenize and merge. So a text may be cut before an added token, if that token is found there
whatever is around it. A *cut token* is one of which that is certain:

- it is matched in the raw text (`normalized: false`; or the tokenizer has no normalizer);
- it takes nothing from its neighbours and asks nothing of them (no `lstrip`, `rstrip`, `single_word`), and
  no other added token asks or takes anything of it: it begins and ends with ASCII punctuation, not `_`;
- no other added token contains it or overlaps with it, nor does it overlap with itself: matches are found
  from the left, the longest first, so what overlaps could hide it.

The part after a cut begins with the cut token, so none of its pieces is taken for the beginning of a text
(which some pre-tokenizers mark). What draws dice (`dropout`) or is neither BPE nor Unigram is never cut.

Pure; costs O(added tokens × MAX_CUT_TOKENS) once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from string import punctuation
from typing import Any

MAX_CUT_TOKENS = 6
"""Enough: every message of a chat begins or ends with one of a few."""
_EDGES = frozenset(punctuation) - {"_"}


@dataclass(frozen=True, slots=True)
class Cuts:
    """A tokenizer's cut tokens in UTF-8, and why there are none."""

    tokens: tuple[bytes, ...]
    why_none: str = ""

    def last(self, text: bytes, start: int, end: int) -> int:
        """Where in `text[start:end]` the last cut token begins, -1: there is none."""
        return max((text.rfind(token, start, end) for token in self.tokens), default=-1)

    def token_at(self, text: bytes, at: int) -> bytes:
        """The cut token that begins there."""
        return next(token for token in self.tokens if text.startswith(token, at))

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens), default=0)


def cuts_of(spec: Mapping[str, Any], template: str = "") -> Cuts:
    """Cut tokens of a tokenizer.json, those first that the chat template writes."""
    if why := _never(spec):
        return Cuts((), why)
    added = [token for token in spec.get("added_tokens") or () if token.get("content")]
    contents = [str(token["content"]) for token in added]
    plain_text = _is_nothing(spec.get("normalizer"))
    candidates = [str(token["content"]) for token in added if _stands_alone(token, plain_text)]
    # stable: special ones before others, those of the template before all
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
    """Whether in some text occurrences of two different tokens share characters."""
    return a in b or b in a or _border(a, b) or _border(b, a)


def _border(a: str, b: str) -> bool:
    """Whether a proper end of `a` is a beginning of `b`."""
    return any(b.startswith(a[i:]) for i in range(1, len(a)))

"""Which JSON value a field has, and what is said if it is another one than the API demands.

The values stay undecoded. Messages have the form of msgspec's own.
"""

from msgspec import Raw

_NULL = Raw(b"null")
_KINDS = {b'"': "str", b"{": "object", b"[": "array", b"t": "bool", b"f": "bool", b"n": "null"}


class RefusedError(Exception):
    """A field is missing or has the wrong shape. `openai.parse` turns it into a Refusal."""


def given(raw: Raw) -> Raw:
    """Return the value, or an empty Raw for `null`."""
    return Raw() if raw == _NULL else raw


def array(raw: Raw, name: str) -> Raw:
    if first(raw) != b"[":
        raise mismatch(raw, name, "`array`")
    return raw


def written(raw: Raw) -> Raw:
    """Return the value, or an empty Raw for `null`. Raises UnicodeDecodeError, because msgspec does not look
    at the texts of a Raw."""
    str(value := given(raw), "utf-8")
    return value


def optional_array(raw: Raw, name: str) -> Raw:
    return array(value, name) if (value := given(raw)) else value


def first(raw: Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def mismatch(raw: Raw, name: str, expected: str) -> RefusedError:
    begins = first(raw)
    if not begins:
        return RefusedError(f"Object missing required field `{name}` - at `$`")
    return RefusedError(f"Expected {expected}, got `{_KINDS.get(begins, 'number')}` - at `$.{name}`")

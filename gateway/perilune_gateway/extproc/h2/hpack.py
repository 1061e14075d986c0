"""Decodes HPACK (RFC 7541): header block → list of (name, value).

    block ─▶ integers and strings ─▶ fields, looked up in the static and the dynamic table

We announce a dynamic table of 0 bytes, but a peer may use one of 4096 bytes until it has read that, so the
decoder has one. A block that neither reads nor changes the table always has the same meaning. `decode`
reports that, and `header_blocks` then caches the block, because decoding one takes about 30 µs.

The Huffman code is canonical: the lengths of its codes define it, and `_CODE` is made from them.

An encoder is not needed: `replies` sends literal fields only. Raises FrameError.
"""

from __future__ import annotations

from collections import deque

from perilune_gateway.extproc.h2 import limits
from perilune_gateway.extproc.h2.frames import Code, FloodError, FrameError

DEFAULT_TABLE_BYTES = 4096
ENTRY_BYTES = 32
"""Number of bytes counted for each field besides its text, in the dynamic table and in a header list."""

Field = tuple[str, str]

# RFC 7541, appendix A: `name` or `name=value`, from index 1 on.
_STATIC_TEXT = """
:authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https :status=200
:status=204 :status=206 :status=304 :status=400 :status=404 :status=500 accept-charset
accept-encoding=gzip,+deflate accept-language accept-ranges accept access-control-allow-origin age allow
authorization cache-control content-disposition content-encoding content-language content-length
content-location content-range content-type cookie date etag expect expires from host if-match
if-modified-since if-none-match if-range if-unmodified-since last-modified link location max-forwards
proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie
strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""
STATIC: tuple[Field, ...] = tuple(
    (name, value.replace("+", " "))
    for name, _, value in (entry.partition("=") for entry in _STATIC_TEXT.split())
)

# RFC 7541, appendix B: bits → symbols of that code length, in order; 256 ends a string and never occurs.
_LENGTHS: dict[int, list[int]] = {
    5: list(b"012aceiost"),
    6: list(b" %-./3456789=A_bdfghlmnpru"),
    7: list(b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    8: list(b"&*,;XZ"),
    10: list(b'!"()?'),
    11: list(b"'+|"),
    12: list(b"#>"),
    13: list(b"\x00$@[]~"),
    14: list(b"^}"),
    15: list(b"<`{"),
    19: [92, 195, 208],
    20: [128, 130, 131, 162, 184, 194, 224, 226],
    21: [153, 161, 167, 172, 176, 177, 179, 209, 216, 217, 227, 229, 230],
    22: [129, 132, 133, 134, 136, 146, 154, 156, 160, 163, 164, 169, 170, 173, 178, 181, 185, 186, 187, 189,
         190, 196, 198, 228, 232, 233],
    23: [1, 135, 137, 138, 139, 140, 141, 143, 147, 149, 150, 151, 152, 155, 157, 158, 165, 166, 168, 174,
         175, 180, 182, 183, 188, 191, 197, 231, 239],
    24: [9, 142, 144, 145, 148, 159, 171, 206, 215, 225, 236, 237],
    25: [199, 207, 234, 235],
    26: [192, 193, 200, 201, 202, 205, 210, 213, 218, 219, 238, 240, 242, 243, 255],
    27: [203, 204, 211, 212, 214, 221, 222, 223, 241, 244, 245, 246, 247, 248, 250, 251, 252, 253, 254],
    28: [2, 3, 4, 5, 6, 7, 8, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 29, 30, 31, 127,
         220, 249],
    30: [10, 13, 22, 256],
}  # fmt: skip
END_OF_STRING = 256


def _codes() -> dict[tuple[int, int], int]:
    """Return (bits, code) → symbol."""
    codes, code, before = {}, 0, 0
    for bits, symbols in _LENGTHS.items():
        code <<= bits - before
        before = bits
        for symbol in symbols:
            codes[bits, code] = symbol
            code += 1
    return codes


_CODE = _codes()


def huffman(data: bytes) -> bytes:
    """Decode a Huffman-coded string. Raises FrameError."""
    out = bytearray()
    code = bits = 0
    for byte in data:
        for shift in range(7, -1, -1):
            code = code << 1 | byte >> shift & 1
            bits += 1
            if bits >= 5 and (symbol := _CODE.get((bits, code))) is not None:
                if symbol == END_OF_STRING:
                    raise _broken("end of string in a string")
                out.append(symbol)
                code = bits = 0
        if bits > 30:
            raise _broken("no such code")
    if bits > 7 or code != (1 << bits) - 1:
        raise _broken("wrong padding")
    return bytes(out)


class Decoder:
    """Decodes the blocks of one connection, which have to come in the order in which they were sent."""

    def __init__(self, table_bytes: int = DEFAULT_TABLE_BYTES) -> None:
        self._allowed_bytes = self._max_bytes = table_bytes
        self._bytes = 0
        self._table: deque[Field] = deque()  # newest first
        self._stateless = True

    def decode(self, block: bytes) -> tuple[list[Field], bool]:
        """Return the block's fields, and whether the block has the same meaning at any time."""
        self._stateless = True
        fields: list[Field] = []
        at = list_bytes = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:  # indexed
                index, at = _integer(block, at, 7)
                fields.append(self._entry(index))
            elif first & 0xE0 == 0x20:  # size of the dynamic table
                size, at = _integer(block, at, 5)
                if fields or size > self._allowed_bytes:
                    raise _broken("table size out of place")
                self._stateless = False
                self._max_bytes = size
                self._evict()
            else:  # literal; bit 6 says whether it is added to the dynamic table
                indexed = first & 0x40
                index, at = _integer(block, at, 6 if indexed else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                fields.append((name, value))
                if indexed:
                    self._insert((name, value))
            list_bytes += _size(fields[-1]) if fields else 0
            if len(fields) > limits.HEADER_FIELDS:
                raise FloodError(f"more than {limits.HEADER_FIELDS} header fields")
            if list_bytes > limits.HEADER_LIST_BYTES:
                raise FloodError(f"a header list of more than {limits.HEADER_LIST_BYTES} bytes")
        return fields, self._stateless

    def _entry(self, index: int) -> Field:
        if 0 < index <= len(STATIC):
            return STATIC[index - 1]
        self._stateless = False
        if not 0 <= index - len(STATIC) - 1 < len(self._table):
            raise _broken(f"no header field {index}")
        return self._table[index - len(STATIC) - 1]

    def _insert(self, field: Field) -> None:
        if not self._max_bytes:
            return  # nothing fits into a table of 0 bytes, so it does not change
        self._stateless = False
        self._table.appendleft(field)
        self._bytes += _size(field)
        self._evict()

    def _evict(self) -> None:
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._table.pop())


def _size(field: Field) -> int:
    return len(field[0]) + len(field[1]) + ENTRY_BYTES


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    limit = (1 << prefix_bits) - 1
    value = block[at] & limit
    at += 1
    if value < limit:
        return value, at
    for shift in (0, 7, 14, 21):
        if at >= len(block):
            raise _broken("block ends in an integer")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise _broken("integer too long")


def _string(block: bytes, at: int) -> tuple[str, int]:
    if at >= len(block):
        raise _broken("block ends before a string")
    coded = block[at] & 0x80
    length, at = _integer(block, at, 7)
    if at + length > len(block):
        raise _broken("block ends in a string")
    raw = block[at : at + length]
    return (huffman(raw) if coded else raw).decode("latin-1"), at + length


def _broken(what: str) -> FrameError:
    return FrameError(Code.COMPRESSION_ERROR, what)

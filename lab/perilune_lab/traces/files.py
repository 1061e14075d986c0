"""Lines of a trace file, plain or gzip, decoded with errors that name file, line and field."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from perilune_api.pool import SpecError

_GZIP_MAGIC = b"\x1f\x8b"
_LFS_POINTER = b"version https://git-lfs"
T = TypeVar("T")


def read_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yield (line number from 1, decoded line), without blank lines. Raises SpecError for a file that cannot
    be read and for a line that is no `kind`: `trace.jsonl:3: Expected `int`, got `str` - at `$.turn``."""
    decoder = msgspec.json.Decoder(kind)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield number, decoder.decode(line)
                except msgspec.DecodeError as error:
                    if line.startswith(_LFS_POINTER):
                        raise SpecError(
                            f"{path}: a pointer of Git LFS, not the file; `git lfs pull`"
                        ) from None
                    raise SpecError(f"{path}:{number}: {error}") from None
    except (OSError, EOFError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SpecError(f"{path}: {cause}") from None

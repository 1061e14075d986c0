"""The software bill of materials of the images' Python packages: the lock file as CycloneDX 1.6.

Debian's packages are listed by the image build itself, which knows what it installed.
"""

import re
from collections.abc import Iterator
from typing import Any

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def document(version: str, lock: str) -> dict[str, Any]:
    """`lock`: the text of a lock file with hashes. The result depends on the arguments alone."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component("perilune", version, "application")},
        "components": list(_packages(lock)),
    }


def _packages(lock: str) -> Iterator[dict[str, Any]]:
    """Yield the packages. Each lists the hashes of all its files, of which an image installs one."""
    pins = list(_PINNED.finditer(lock))
    ends = [pin.start() for pin in pins[1:]] + [len(lock)]
    for pin, end in zip(pins, ends, strict=True):
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", lock[pin.end() : end])
        listed = [{"alg": "SHA-256", "content": digest} for digest in hashes]
        yield {**_component(pin[1].lower(), pin[2], "library"), "hashes": listed}


def _component(name: str, version: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}

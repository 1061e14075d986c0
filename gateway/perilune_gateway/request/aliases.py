"""Aliases: names that stand for others without telling them. They are keyed hashes of the gateway's secret.

Gateways with the same secret have the same aliases. Each costs about 2 µs.

The id of a response also says where it is stored, because only the process that gave an answer
can continue it (`previous_response_id`). So any gateway of the pool finds that endpoint, also after a
restart, and no answer has to be read.

    resp_ + session (32 digits) + endpoint (12) + number (14) + signature (16)

The signature covers the tenant, so no client can make an id that leads to an endpoint of its choice.
"""

import re
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from perilune_gateway.request.identity import INFERRED, inferred_id

_ENDPOINT = "endpoint-"
_RESPONSE = re.compile(r"resp_(([0-9a-f]{32})([0-9a-f]{12})[0-9a-f]{14})([0-9a-f]{16})")


class Stored(NamedTuple):
    """What the id of a response tells."""

    session_id: str
    """Id of the inferred session that a request without one continues."""
    endpoint: str
    """The alias of the endpoint that has the response."""


class Aliases:
    """The aliases of one secret."""

    def __init__(self, secret: bytes, previous: bytes = b"") -> None:
        """`previous`: the secret before, whose ids of responses are still read; empty if there is none."""
        self._key = blake2b(secret).digest()
        self._keys = (self._key, *([blake2b(previous).digest()] if previous else []))

    def cache_salt(self, tenant: str, own: str) -> str:
        """Return a `cache_salt` of 64 characters for a tenant's request whose own salt is `own`, or empty. No
        `own` of one tenant gives the salt of another. vLLM allows 128 characters, without `@` and `/`."""
        return self._hash(b"cache_salt", f"{len(tenant)}:{tenant}{own}", 32)

    def endpoint(self, address: str) -> str:
        """Return an endpoint's name for clients that may not know its address."""
        return _ENDPOINT + self._hash(b"endpoint", address, 6)

    def endpoints(self, address: str) -> tuple[str, ...]:
        """Return the names of an endpoint that ids of responses may have, that of the previous secret among
        them."""
        return tuple(_ENDPOINT + self._hash(b"endpoint", address, 6, key) for key in self._keys)

    def response(self, tenant: str, session_id: str, address: str, number: int) -> str:
        """Return the id of a response that the endpoint at `address` gives. `number`, of at most 56 random
        bits, makes it unique. Sessions that clients name are known by their requests, not by the id."""
        session = (session_id if session_id.startswith(INFERRED) else inferred_id()).removeprefix(INFERRED)
        told = f"{session}{self.endpoint(address).removeprefix(_ENDPOINT)}{number:014x}"
        return f"resp_{told}{self._signature(tenant, told)}"

    def stored(self, tenant: str, response_id: str) -> Stored | None:
        """Read the id of a response; None for an id that no gateway of this pool gave to this tenant."""
        found = _RESPONSE.fullmatch(response_id)
        if not found:
            return None
        if not any(compare_digest(found[4], self._signature(tenant, found[1], key)) for key in self._keys):
            return None
        return Stored(INFERRED + found[2], _ENDPOINT + found[3])

    def is_ours(self, response_id: str) -> bool:
        """Return whether the id has the form of ours, whoever made it."""
        return _RESPONSE.fullmatch(response_id) is not None

    def _signature(self, tenant: str, told: str, key: bytes = b"") -> str:
        return self._hash(b"response", told + tenant, 8, key)

    def _hash(self, kind: bytes, text: str, size: int, key: bytes = b"") -> str:
        data = text.encode(errors="surrogatepass")
        return blake2b(data, digest_size=size, key=key or self._key, person=kind).hexdigest()

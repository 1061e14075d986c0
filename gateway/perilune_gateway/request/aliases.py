"""Aliases: names that stand for others without telling them. They are keyed hashes of the gateway's secret.

Gateways with the same secret have the same aliases. Each costs about 2 µs.
"""

from hashlib import blake2b


class Aliases:
    """The aliases of one secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret).digest()

    def cache_salt(self, tenant: str, own: str) -> str:
        """A `cache_salt` of 64 characters for a tenant's request whose own salt is `own`, or empty. No
        `own` of one tenant gives the salt of another. vLLM allows 128 characters, without `@` and `/`."""
        return self._hash(b"cache_salt", f"{len(tenant)}:{tenant}{own}", 32)

    def endpoint(self, address: str) -> str:
        """An endpoint's name for clients that may not know its address."""
        return f"endpoint-{self._hash(b'endpoint', address, 6)}"

    def _hash(self, kind: bytes, text: str, size: int) -> str:
        data = text.encode(errors="surrogatepass")
        return blake2b(data, digest_size=size, key=self._key, person=kind).hexdigest()

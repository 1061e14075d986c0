"""Names what reading bytes raises that others wrote: clients, engines, the store's master, other gateways."""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Catch all of these wherever such bytes are decoded: msgspec raises the second for a text that is no UTF-8,
and the third for values that nest too deeply, at a depth that depends on the caller's."""

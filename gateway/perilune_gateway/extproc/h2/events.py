"""The events of a connection's streams."""

from __future__ import annotations

from msgspec import Struct


class Opened(Struct, frozen=True, gc=False):
    """The peer has opened a stream."""

    stream: int
    path: str


class Message(Struct, frozen=True, gc=False):
    """A complete gRPC message. Call `Connection.handled` with its length when it was handled."""

    stream: int
    payload: bytes


class Ended(Struct, frozen=True, gc=False):
    """The peer has ended its half of the stream. Call `Connection.finish` to end the other."""

    stream: int


class Reset(Struct, frozen=True, gc=False):
    """The stream has ended in both directions; nothing more can be sent."""

    stream: int


Event = Opened | Message | Ended | Reset

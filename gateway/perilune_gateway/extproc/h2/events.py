"""What a connection tells its owner about its streams."""

from __future__ import annotations

from msgspec import Struct


class Opened(Struct, frozen=True, gc=False):
    stream: int
    path: str


class Message(Struct, frozen=True, gc=False):
    """A whole gRPC message. Call `Connection.handled` with its length when it is done with."""

    stream: int
    payload: bytes


class Ended(Struct, frozen=True, gc=False):
    """The peer sends nothing more on this stream and awaits its end: call `Connection.finish`."""

    stream: int


class Reset(Struct, frozen=True, gc=False):
    """The stream is over in both directions; nothing more can be sent."""

    stream: int


Event = Opened | Message | Ended | Reset

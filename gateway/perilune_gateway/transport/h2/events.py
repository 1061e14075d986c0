"""What a connection tells its owner of its streams."""

from __future__ import annotations

from typing import NamedTuple


class Opened(NamedTuple):
    stream: int
    path: str


class Message(NamedTuple):
    """A whole gRPC message. Call `handled` with its length when it is done with."""

    stream: int
    payload: bytes


class Ended(NamedTuple):
    """The peer sends nothing more on this stream, and awaits its end: `finish`."""

    stream: int


class Reset(NamedTuple):
    """The stream is over on both sides; nothing more can be sent."""

    stream: int


Event = Opened | Message | Ended | Reset

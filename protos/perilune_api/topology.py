"""Where an endpoint stands in the fabric, how far two stand apart, how fast the link is.

Levels, nearest first: the same node (0), the same rack or top-of-rack switch (1), the same group of
racks under one spine (2), beyond (3). An unknown label is equal to nothing, so an endpoint without
labels is `FABRIC` away from every other, and `NODE` away only from itself.
"""

from enum import IntEnum
from typing import NamedTuple


class Level(IntEnum):
    """Distance between two places; also the narrowest level that holds both."""

    NODE = 0
    RACK = 1
    SPINE = 2
    FABRIC = 3


class Place(NamedTuple):
    """Position of an endpoint; an empty string means unknown."""

    node: str = ""
    rack: str = ""
    spine: str = ""


class Link(NamedTuple):
    """The way between two endpoints."""

    distance: Level
    bandwidth_bytes_per_s: float
    """Bandwidth of one transfer alone on this link."""
    slowdown: float = 1.0
    """Observed seconds / predicted seconds, learned online; 1.0 = as believed."""
    carries_kv: bool = True
    """Whether the other end can hand KV over to this one, by what the engines of both said."""


class Bandwidth(NamedTuple):
    """Bytes per second of one transfer alone, by the narrowest level that holds both ends: an H20 node with
    network cards of NIC_GBITS, one transfer using one of them."""

    node: float = 200e9
    rack: float = 9.7e9
    spine: float = 9.7e9
    fabric: float = 4.0e9

    def at(self, level: Level) -> float:
        return self[level]


NIC_GBITS = 200.0
"""Speed of the network cards that Bandwidth is for, in Gbit/s."""


def distance(a: Place, b: Place) -> Level:
    """Return the nearest level that both places share; racks with one name under two spines are two racks."""
    same_spine = bool(a.spine) and a.spine == b.spine
    same_rack = bool(a.rack) and a.rack == b.rack and a.spine == b.spine
    if a.node and a.node == b.node:
        return Level.NODE
    if same_rack:
        return Level.RACK
    return Level.SPINE if same_spine else Level.FABRIC

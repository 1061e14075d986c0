"""Which endpoint holds which blocks: the index over chained block hashes."""

from perilune_gateway.state.prefix_index.index import Matches, PrefixIndex
from perilune_gateway.state.prefix_index.run_map import FIRST
from perilune_gateway.state.prefix_index.stats import EndpointBlocks, IndexStats

__all__ = ["FIRST", "EndpointBlocks", "IndexStats", "Matches", "PrefixIndex"]

"""The decision log: a file of JSON lines from which every decision can be repeated (docs/decision-log.md).

Decisions ─▶ log: DecisionLog ─▶ lines: Writer ─▶ file: RotatedFile ┄┄▶ reading: read ─▶ perilune whatif
"""

from perilune_gateway.observe.decision_log.file import KEEP, MAX_BYTES, RotatedFile
from perilune_gateway.observe.decision_log.lines import SCHEMA, Writer
from perilune_gateway.observe.decision_log.log import DecisionLog
from perilune_gateway.observe.decision_log.reading import Cut, Ended, Logged, read

__all__ = [
    "KEEP",
    "MAX_BYTES",
    "SCHEMA",
    "Cut",
    "DecisionLog",
    "Ended",
    "Logged",
    "RotatedFile",
    "Writer",
    "read",
]

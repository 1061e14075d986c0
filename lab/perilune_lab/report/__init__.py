"""Reports: what a run measured, as one versioned document (`perilune.report/v1`) and as a table.

    client's results ─▶ Measured ─run─▶ Run ─▶ Report ─▶ encode, table, figure.draw

`document` is the document, `measured` computes one policy's numbers (`moves` those of its migrations),
`columns` puts runs side by side. A field that the caller cannot know is absent in the document, never 0 or
null; `docs/report.md` describes it for readers of the JSON. All seconds are engine seconds: wall seconds ×
`time_scale` (1 on real hardware).
"""

from perilune_lab.report.columns import table
from perilune_lab.report.document import (
    GOODPUT_TPOT_S,
    GOODPUT_TTFT_S,
    SCHEMA,
    Answered,
    Ceiling,
    Hotspot,
    Migrations,
    PerEndpoint,
    PlayedSessions,
    Quantiles,
    Report,
    Run,
    Scheduling,
    Tokens,
    decode,
    encode,
    hotspot,
    quantiles,
)
from perilune_lab.report.measured import Measured, run
from perilune_lab.report.moves import PlayedTurn, migrations

__all__ = [
    "GOODPUT_TPOT_S",
    "GOODPUT_TTFT_S",
    "SCHEMA",
    "Answered",
    "Ceiling",
    "Hotspot",
    "Measured",
    "Migrations",
    "PerEndpoint",
    "PlayedSessions",
    "PlayedTurn",
    "Quantiles",
    "Report",
    "Run",
    "Scheduling",
    "Tokens",
    "decode",
    "encode",
    "hotspot",
    "migrations",
    "quantiles",
    "run",
    "table",
]

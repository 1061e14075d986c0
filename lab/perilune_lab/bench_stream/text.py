"""What `perilune bench-stream` prints: a table of bursts, with their ratio where there are two."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from rich.table import Table

from perilune_lab.bench_stream.burst import Measured


def table(bursts: Sequence[Measured], title: str, published: bool) -> Table:
    """Return a table with a row per quantity and two columns per burst; for two bursts, the ratio of the
    first to the second and, if requested, the published one."""
    grid = Table(title=title, title_justify="left")
    grid.add_column("")
    for burst in bursts:
        for side in ("client", "engine"):
            grid.add_column(f"{burst.name} {side}".strip(), justify="right")
    if len(bursts) == 2:
        for side in ("client", "engine", *(["published"] if published else [])):
            grid.add_column(f"ratio {side}", justify="right")
    for label, cells in rows(bursts, published):
        grid.add_row(label, *cells)
    return grid


def rows(bursts: Sequence[Measured], published: bool) -> list[tuple[str, list[str]]]:
    found = []
    for field in ("submit", "ttft", "tpot", "itl", "latency"):
        for q in ("p50", "p95", "p99", "mean"):
            values = [_value(burst, side, field, q) for burst in bursts for side in ("client", "engine")]
            cells = ["" if value is None else f"{value * 1e3:,.1f} ms" for value in values]
            name = f"{field.upper() if field in ('ttft', 'tpot', 'itl') else field} {q}"
            found.append((name, cells + _ratios(values, name if published else "")))
    rates: list[float | None] = [rate for burst in bursts for rate in (burst.tokens_per_s, None)]
    found.append(
        (
            "tokens/s",
            ["" if r is None else f"{r:,.0f}" for r in rates]
            + _ratios(rates, "tokens/s" if published else ""),
        )
    )
    counts = [cell for b in bursts for cell in (f"{b.succeeded} of {b.requests}", "")]
    found.append(("succeeded", counts))
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        counts = [cell for b in bursts for cell in (_count(b, name), "")]
        found.append((name.replace("_", " "), counts))
    return [row for row in found if any(row[1])]


def _count(burst: Measured, name: str) -> str:
    """Return the tokens as the engine counted them. `~` stands before sums that have counts of our own in
    them."""
    tokens = getattr(burst, name)
    if tokens is UNSET:
        return "not reported"
    return f"{tokens:,}" if burst.counted == burst.succeeded else f"~{tokens:,}"


def _value(burst: Measured, side: str, field: str, q: str) -> float | None:
    if field == "submit":
        quantiles = burst.submit_s if side == "client" else UNSET
    else:
        quantiles = getattr(getattr(burst, side), f"{field}_s")
    return None if quantiles is UNSET else getattr(quantiles, q)


PUBLISHED = {
    "TTFT p50": 418 / 143,
    "TTFT p95": 799 / 260,
    "TPOT p50": 141 / 100,
    "ITL p99": 401 / 150,
    "latency p50": 1416 / 862,
    "tokens/s": 164 / 254,
}
"""Serial / batched, of 32 unique prompts at once on another engine, GPU and model; how long its prompts were
is not known."""


def _ratios(values: Sequence[float | None], name: str) -> list[str]:
    """Return the ratios of the first burst to the second, for each side, then the published ratio of that
    quantity if there is one."""
    if len(values) != 4:
        return []
    pairs = zip(values[:2], values[2:], strict=True)
    ratios = [f"{a / b:.2f}" if a is not None and b else "" for a, b in pairs]
    if not name:
        return ratios
    return [*ratios, f"{PUBLISHED[name]:.2f}" if name in PUBLISHED else ""]

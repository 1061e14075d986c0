"""What `perilune whatif` prints: a summary, a table of policies, their reasons and a caveat, or all of it as
JSON."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perilune_lab.quantiles import mean, quantile
from perilune_lab.terminal.formats import as_percent
from perilune_lab.whatif.arms import RECORDED, Arm, WhatIf

SCHEMA = "perilune.whatif/v1"
CAVEAT = """\
Every decision was taken again on the facts recorded with it. Had the other policy really run, sessions,
caches and queues would differ from its first other choice on. Read single choices here; for what a policy
does to a whole fleet, run `perilune simulate`. Times are predictions of the gateway's model.\
"""


def render(found: WhatIf) -> RenderableType:
    """Return summary, table of policies, reasons and caveat."""
    return Group(
        *(Text(line) for line in summary(found)), Text(), _policies(found), _reasons(found), Text(CAVEAT)
    )


def summary(found: WhatIf) -> Iterator[str]:
    others = found.decisions - found.planned
    yield (
        f"{found.decisions:,} decisions over {found.last_time - found.first_time:,.0f} s,"
        f" {found.from_headers:,} of them from the headers;"
        f" {found.without_policy:,} more needed no policy (pass-through, early refusals)"
    )
    yield f"decided again by their own policy: {found.as_recorded:,} of {others:,} come out as recorded" + (
        "" if found.as_recorded == others else "; the policies here are not those that recorded: take care"
    )
    if found.planned:
        yield f"the migration planner took {found.planned:,} more; policies are not asked about those moves"
    if found.endings:
        yield "they ended: " + ", ".join(f"{n:,} {outcome}" for outcome, n in found.endings.most_common())
    if any(arm.needs_body for arm in found.arms.values()):
        yield (
            "averages of policies with `no body` are over fewer decisions;"
            " only their changes compare like with like"
        )
    for arm in found.arms.values():
        for what, number in arm.failed.most_common(3):
            yield f"{arm.policy} failed on {number:,} decisions, which its row leaves out: {what}"
    yield from found.cuts


def _policies(found: WhatIf) -> Table:
    title = "Other policies on the recorded facts"
    if found.params:
        title += ", with " + ", ".join(f"{name}={value}" for name, value in found.params.items())
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in (
        *("same", "TTFT s", "change", "p90", "cost s", "change", "cached", "moves", "off host"),
        *("refused", "no body", "busiest"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    by_ttft = sorted(found.arms.values(), key=lambda arm: arm.ttft_change_s / max(1, arm.compared))
    for arm in (found.recorded, *by_ttft):
        table.add_row(
            arm.policy, *_cells(arm, len(found.endpoints)), style="bold" if arm is found.recorded else ""
        )
    return table


def _cells(arm: Arm, endpoints: int) -> list[str]:
    if not arm.choices:
        return [*[""] * 9, str(arm.refused or ""), str(arm.needs_body or ""), ""]
    is_other = arm.policy != RECORDED
    ttft = sorted(arm.ttft_s)
    prompts = arm.cached_tokens + arm.new_tokens
    changes = is_other and arm.compared
    return [
        as_percent(arm.same / arm.decisions) if is_other else "",
        f"{mean(ttft):.3f}",
        f"{arm.ttft_change_s / arm.compared:+.3f}" if changes else "",
        f"{quantile(ttft, 0.9):.3f}",
        f"{arm.cost_s / arm.choices:.3f}",
        f"{arm.cost_change_s / arm.compared:+.3f}" if changes else "",
        as_percent(arm.cached_tokens / prompts) if prompts else "",
        f"{arm.moves} of {len(arm.moved)}" if arm.moves else "",
        as_percent(arm.off_host / arm.had_host) if arm.had_host else "",
        str(arm.refused or ""),
        str(arm.needs_body or ""),
        f"{busiest(arm, endpoints):.2f}",
    ]


def busiest(arm: Arm, endpoints: int) -> float:
    """Return the uncached tokens at the busiest endpoint, divided by the mean over all endpoints."""
    if not arm.new_tokens:
        return 1.0
    return max(new for _, new in arm.by_endpoint.values()) * endpoints / arm.new_tokens


def _reasons(found: WhatIf) -> Table:
    table = Table(title="Reasons", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for arm in (found.recorded, *found.arms.values()):
        total = sum(arm.reasons.values())
        shares = ", ".join(f"{reason} {as_percent(n / total)}" for reason, n in arm.reasons.most_common())
        table.add_row(arm.policy, shares)
    return table


def document(found: WhatIf) -> dict[str, object]:
    """Return everything as plain values (docs/decision-log.md)."""
    return {
        "schema": SCHEMA,
        "caveat": " ".join(CAVEAT.split()),
        "params": dict(found.params),
        "decisions": found.decisions,
        "from_headers": found.from_headers,
        "without_policy": found.without_policy,
        "planned": found.planned,
        "as_recorded": found.as_recorded,
        "seconds": found.last_time - found.first_time,
        "endings": dict(found.endings),
        "skipped": found.cuts,
        "recorded": _arm(found.recorded),
        "policies": {policy: _arm(arm) for policy, arm in found.arms.items()},
    }


def _arm(arm: Arm) -> dict[str, object]:
    ttft = sorted(arm.ttft_s)
    return {
        "same": arm.same,
        "refused": arm.refused,
        "needs_body": arm.needs_body,
        "failed": sum(arm.failed.values()),
        "moves": arm.moves,
        "sessions_moved": len(arm.moved),
        "had_host": arm.had_host,
        "off_host": arm.off_host,
        "ttft_s": {
            "mean": mean(ttft),
            "p50": quantile(ttft, 0.5),
            "p90": quantile(ttft, 0.9),
            "p99": quantile(ttft, 0.99),
        }
        if ttft
        else None,
        "ttft_change_s": arm.ttft_change_s / arm.compared if arm.compared else None,
        "cost_s": arm.cost_s / arm.choices if arm.choices else None,
        "cost_change_s": arm.cost_change_s / arm.compared if arm.compared else None,
        "cached_tokens": arm.cached_tokens,
        "reasons": dict(arm.reasons),
        "endpoints": {
            address: {"requests": requests, "uncached_tokens": new}
            for address, (requests, new) in sorted(arm.by_endpoint.items())
        },
    }

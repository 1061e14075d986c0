"""f2: which sessions computed reused tokens first, and how few sessions have most of the tokens."""

from __future__ import annotations

from perilune_lab.terminal.formats import as_percent
from perilune_research.evaluate.figures.style import Context, Drawn, Figure, canvas

_SHOWN = 200


def _draw(context: Context) -> Drawn:
    found, tokens = context.traffic
    assert found.reuse, "sessions of one turn only"
    shares = {
        "intra-session": found.reuse.intra_session,
        "cross-session": found.reuse.cross_session,
        "shared prefix": found.reuse.shared_prefix,
    }
    total = sum(tokens)
    at, carried, curve = 0, 0, []
    for i, value in enumerate(tokens, 1):
        carried += value
        if i * _SHOWN >= at * len(tokens) or i > 0.985 * len(tokens):
            curve.append((value, i / len(tokens), carried / total))
            at += 1
    figure = canvas(10, 3.6)
    pie, cdf = figure.subplots(1, 2, width_ratios=(1, 1.6))
    pie.pie(
        list(shares.values()),
        colors=["#0057d9", "#e69f00", "#009e73"],
        startangle=90,
        counterclock=False,
        wedgeprops={"linewidth": 1, "edgecolor": "white"},
    )
    pie.legend(
        [f"{name} {as_percent(part)}" for name, part in shares.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        title="reused tokens, by who computed them first",
    )
    values = [value for value, _, _ in curve]
    cdf.plot(values, [share for _, share, _ in curve], color="#0057d9", label="share of sessions")
    cdf.plot(values, [share for _, _, share in curve], color="#d62f2f", label="share of all input tokens")
    top = tokens[-max(1, len(tokens) // 100)]
    cdf.axvline(top, color="black", linestyle="--", linewidth=1)
    cdf.axvspan(top, tokens[-1], color="#d62f2f", alpha=0.08)
    cdf.annotate(
        f"top 1 % of\nsessions:\n{as_percent(found.top_1_percent_share)} of\ninput tokens",
        (top, 0.06),
        xytext=(5, 0),
        textcoords="offset points",
        fontsize=8.5,
    )
    cdf.set(
        xscale="log",
        xlabel="input tokens of a session, all turns (log)",
        ylabel="cumulated share",
        ylim=(0, 1.02),
    )
    cdf.grid(alpha=0.25)
    cdf.legend(loc="upper left")
    data = {
        "sessions": len(tokens),
        "requests": found.requests,
        "reuse": shares,
        "top_1_percent_share": found.top_1_percent_share,
        "top_1_percent_from_tokens": top,
        "cdf": {"columns": ["tokens", "share_of_sessions", "share_of_tokens"], "rows": curve},
    }
    return Drawn(figure, data)


F2 = Figure(
    "Reuse, and who carries the tokens",
    "Generated traffic of one seed, sessions played to their end against an infinite cache. Left: reused"
    " prompt tokens by the session that computed them first. Right: sessions by their input tokens; the top"
    " 1 % are right of the dashed line.",
    _draw,
)

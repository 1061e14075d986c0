"""Shadow policies: what other policies would have decided, judged in a process of its own.

    on_recorded ─▶ share, budget.py ─▶ queue ┄ run ┄▶ lines of the decision log ─▶ pipe ─▶ judge.py
                                       tally.py ◀─ Opinion of each policy ◀────── pipe ◀──┘

judge.py      the process: decides each decision again by every shadow policy, and measures both choices
budget.py     how much CPU may be spent, as a pure account of time
tally.py      the sums of all opinions, and the page and the metrics that they are shown by
process.py    the gateway's side: sends decisions, reads opinions, ends a process that hangs

A request costs an entry in a queue. Whatever a shadow policy does, the gateway waits for nothing.
"""

from perilune_gateway.observe.shadow.process import Shadow
from perilune_gateway.observe.shadow.tally import ShadowStats

__all__ = ["Shadow", "ShadowStats"]

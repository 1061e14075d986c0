"""An engine with data-parallel ranks, and what has to be true of requests to it."""

from collections import Counter

from enginebed import judged

BLOCK = 32
RANKS = 2


def ranked(model: str, **engine: object) -> dict[str, object]:
    """Return the spec of a pool whose engine has RANKS ranks. `engine`: further fields of it."""
    return {
        "model": {"name": "tiny", "source": model, "contextTokens": 4096, "tokenizer": model},
        "engine": {"dataParallel": RANKS, "args": ["--num-gpu-blocks-override=160"], **engine},
    }


def judged_by_rank(phase: judged.Phase, address: str, exact: float) -> None:
    """Assert that each request went to the rank that the gateway chose, else predictions would promise too
    much; that all ranks were used; and that a prompt's BOS was counted. `exact`: the least share of exact
    predictions."""
    used = Counter(each.target for each in phase.answered)
    print(f"\nrequests by rank: {dict(used)}")
    assert not phase.failed, judged.misses(phase)
    assert set(used) == {f"{address}#{rank}" for rank in range(RANKS)}
    wrong = [e for e in phase.answered if e.source == "local" and e.prompt != e.prompt_predicted]
    assert not wrong, judged.misses(phase)
    assert sum(each.cached for each in phase.answered) > 0.2 * sum(each.prompt for each in phase.answered)
    assert not phase.far_above(BLOCK), judged.misses(phase)
    assert phase.exact >= exact, judged.misses(phase)

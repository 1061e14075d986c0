"""How the scenarios with genuine engines compare two answers to one prompt."""

from math import inf

import pytest

from enginebed.completions import SAME, furthest


def answer(*tokens: tuple[int, float]) -> dict[str, object]:
    ids, logs = zip(*tokens, strict=True)
    return {"choices": [{"token_ids": list(ids), "logprobs": {"token_logprobs": list(logs)}}]}


USUAL = answer((7, -1.0), (8, -2.0), (9, -0.5))


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        pytest.param(USUAL, 0.0, id="equal"),
        pytest.param(answer((7, -1.0), (8, -2.25), (9, -0.5)), 0.25, id="equal tokens, another probability"),
        pytest.param(
            answer((7, -1.0), (5, -2.0), (3, -4.0)), 0.0, id="parts at a tie; what follows says nothing"
        ),
        pytest.param(
            answer((5, -1.5), (8, -2.0), (9, -0.5)), 0.5, id="another first token that is likelier there"
        ),
        pytest.param(answer((7, -1.0), (2, -2.0)), 0.0, id="ends at a tie"),
        pytest.param(answer((7, -1.0), (8, -2.0)), inf, id="ends before the other"),
    ],
)
def test_answers_are_compared_up_to_the_first_token_that_differs(
    other: dict[str, object], apart: float
) -> None:
    assert furthest(USUAL, other) == furthest(other, USUAL) == pytest.approx(apart, abs=SAME / 10)

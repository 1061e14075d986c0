"""Where: the same as one dict, in less."""

from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.state.prefix_index.runs import Run
from perilune_gateway.state.prefix_index.where import Where

RUNS = [Run(0.0) for _ in range(4)]
rows = st.lists(st.integers(0, 90), min_size=1, max_size=20, unique=True)


@given(st.lists(st.tuples(st.sampled_from(["enter", "put", "drop"]), rows, st.sampled_from(RUNS))))
def test_like_one_dict(steps):
    where, model = Where(), {}
    for step, row, run in steps:
        if step == "put":
            where.put(row, run)
            model.update(dict.fromkeys(row, run))
        elif step == "drop":
            known = [block for block in row if block in model]
            where.drop(known)
            for block in known:
                del model[block]
        elif row[0] not in model and run not in model.values():
            kept = where.enter(row, run)
            assert kept == row[: next((n for n, block in enumerate(row) if block in model), len(row))]
            model.update(dict.fromkeys(kept, run))
        assert {block: where.get(block) for block in where} == model
        assert [block in where for block in row] == [block in model for block in row]

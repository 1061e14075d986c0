"""Token ids of positions in the tree of runs, and the names of their blocks."""

from perilune_gateway.request import block_hashes
from perilune_lab.simulate.runs import ROOT, Runs
from perilune_lab.simulate.texts import NamedByGateway, Texts
from perilune_lab.simulate.workload import Task

SIZE = 16


def tree() -> tuple[Runs, int, int]:
    """Two prompts of 70 and 60 tokens that share the first 40."""
    runs = Runs()
    shared = runs.add(ROOT, 40)
    return runs, runs.add(shared, 30), runs.add(shared, 20)


def test_prompts_share_tokens_as_far_as_they_share_runs() -> None:
    runs, a, b = tree()
    texts = Texts(runs, SIZE)
    one, other = texts.ids(a, 70), texts.ids(b, 60)
    assert (len(one), len(other)) == (70, 60)
    assert one[:40] == other[:40]
    assert one[40] != other[40]
    assert texts.ids(a, 50) == one[:50]


def test_blocks_have_the_gateways_own_names() -> None:
    runs, a, b = tree()
    texts = Texts(runs, SIZE)
    ours = block_hashes.chain(texts.ids(a, 70), SIZE, 0)
    assert [int.from_bytes(name) for name in texts.names(a, 70)] == ours
    assert texts.names(a, 50) == texts.names(a, 70)[:3]
    assert texts.names(a, 70)[:2] == texts.names(b, 60)[:2]
    assert texts.names(a, 70)[2] != texts.names(b, 60)[2], "its end belongs to one of them"


def test_an_engine_goes_on_with_these_names() -> None:
    runs, a, _ = tree()
    texts, hasher = Texts(runs, SIZE), NamedByGateway(SIZE)
    names, ids, parent = [], texts.ids(a, 70), hasher.root
    for at in range(0, 64, SIZE):
        parent = hasher.block(parent, ids[at : at + SIZE], ())
        names.append(parent)
    assert names == texts.names(a, 70)


def test_a_sequence_may_grow_without_changing_the_text() -> None:
    runs, a, _ = tree()
    texts = Texts(runs, SIZE)
    turn = Task(
        session=0,
        number=0,
        run=a,
        prompt_tokens=50,
        answer_run=a,
        output_tokens=20,
        gap_s=0.0,
        timestamp_s=0.0,
    )
    table = texts.open(turn)
    table.tokens.extend(texts.answer(turn))
    table.chain.append(b"x")
    assert table.tokens == texts.ids(a, 70)
    assert texts.open(turn).tokens == texts.ids(a, 50)
    assert texts.names(a, 50) == texts.names(a, 70)[:3]

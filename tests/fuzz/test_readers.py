"""The short form of `make fuzz`: mutations of inputs that are read well, the same ones in every run."""

from random import Random

import pytest
from property_examples import examples
from readers import APIS, SEEDS, TARGETS

from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest

MUTATIONS = examples(300)


def mutated(data: bytes, dice: Random) -> bytes:
    """Change, leave out, repeat or move a few of the bytes."""
    out = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, to = sorted((dice.randrange(len(out) + 1), dice.randrange(len(out) + 1)))
        match dice.randrange(5):
            case 0:
                out[at : at + 1] = dice.randbytes(1)
            case 1:
                del out[at : min(to, at + 8)]
            case 2:
                out[at:at] = out[at:to]
            case 3:
                out[at:at] = dice.choice(
                    (b"\0", b"\xff" * 8, b"-1", b"9" * 30, b"\xed\xa0\x80", b"[", b"{", b'"')
                )
            case 4:
                out = out[at:to] + out[:at] + out[to:]
    return bytes(out)


@pytest.mark.parametrize("data", SEEDS["bodies"])
def test_bodies_to_begin_with_are_read_well(data: bytes) -> None:
    assert isinstance(parse(APIS[data[0]], data[1:]), ParsedRequest)


@pytest.mark.hypothesis  # `make test-heavy` tries all
@pytest.mark.parametrize("kind", TARGETS)
def test_a_reader_refuses_damaged_input_and_goes_on(kind: str) -> None:
    dice = Random(kind)
    for seed in SEEDS[kind]:
        TARGETS[kind](seed)
        for _ in range(MUTATIONS):
            data = mutated(seed, dice)
            try:
                TARGETS[kind](data)
            except Exception as error:
                error.add_note(f"input: {data!r}")
                raise

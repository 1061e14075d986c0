import pytest

from perilune_api.topology import Level, Place, distance

HERE = Place("n1", "r1", "s1")


@pytest.mark.parametrize(
    ("other", "level"),
    [
        pytest.param(Place("n1", "r1", "s1"), Level.NODE, id="same node"),
        pytest.param(Place("n2", "r1", "s1"), Level.RACK, id="same rack"),
        pytest.param(Place("n2", "r2", "s1"), Level.SPINE, id="same spine"),
        pytest.param(Place("n2", "r2", "s2"), Level.FABRIC, id="beyond"),
        pytest.param(Place("n2", "r1", "s2"), Level.FABRIC, id="racks of one name under two spines"),
        pytest.param(Place("n2"), Level.FABRIC, id="unlabelled"),
        pytest.param(Place(), Level.FABRIC, id="unknown"),
    ],
)
def test_distance_is_the_narrowest_common_level(other: Place, level: Level) -> None:
    assert distance(HERE, other) is level
    assert distance(other, HERE) is level


def test_unknown_is_equal_to_nothing() -> None:
    assert distance(Place(), Place()) is Level.FABRIC

import operator
import sysconfig
from pathlib import Path


def test_the_standard_librarys_operator_is_not_shadowed() -> None:
    assert Path(operator.__file__).parent == Path(sysconfig.get_path("stdlib"))
    assert not (Path(__file__).parents[2] / "operator/__init__.py").exists()

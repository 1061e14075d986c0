"""What users install: the wheel holds the product and the lab, and nothing of the research."""

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ROOT / "protos/perilune_api",
    ROOT / "gateway/perilune_gateway",
    ROOT / "operator/perilune_operator",
    ROOT / "lab/perilune_lab",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built without network access: this environment has hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"  # what pip runs
    built = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("perilune-*.whl")
    return ZipFile(path)


def test_the_wheel_holds_four_packages_and_no_research(wheel: ZipFile):
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {p.name for p in PACKAGES}


def test_the_wheel_holds_every_module_of_its_packages(wheel: ZipFile):
    for folder in PACKAGES:
        modules = {str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}
        assert modules <= set(wheel.namelist())


def test_the_wheel_has_the_three_programs(wheel: ZipFile):
    (path,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    found = ConfigParser()
    found.read_string(wheel.read(path).decode())
    assert set(found["console_scripts"]) == {
        "perilune",
        "perilune-extension-server",
        "perilune-gateway",
        "perilune-operator",
    }

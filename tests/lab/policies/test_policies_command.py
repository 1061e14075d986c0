"""`perilune policies` and `perilune policy new` as a user calls them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from policy_packages import MINE, install, installed, on_path

from perilune_api.policies import PolicyName
from perilune_lab.policies import cli, new

PYPROJECT = "pyproject.toml"


def test_every_policy_is_listed_with_its_parameters_and_origin(tmp_path: Path, capsys) -> None:
    with installed(tmp_path, MINE):
        assert cli.main([]) == 0
        out = capsys.readouterr().out
    assert [name for name in (*PolicyName, "mine") if name not in out] == []
    assert "my-policies 1.0" in out
    assert "contract 1" in out


def test_one_policy_is_explained(tmp_path: Path, capsys) -> None:
    with installed(tmp_path, MINE):
        assert cli.main(["mine"]) == 0
    out = capsys.readouterr().out
    assert "mine, from my-policies 1.0: Choose the host, unless another endpoint has fewer" in out
    assert "spec.routing.policy.outside.mine" in out
    assert "Pending tokens that a move must save." in out
    assert "int >= 0" in out
    assert cli.main(["conductor"]) == 0
    assert "no_scheduling or cache_aware" in capsys.readouterr().out
    assert cli.main(["sticky"]) == 0
    assert "It has no parameters." in capsys.readouterr().out


def test_json_has_all_of_it(tmp_path: Path, capsys) -> None:
    install(tmp_path, MINE)
    install(tmp_path, "import nothing_like_it", "broken")
    with on_path(tmp_path):
        assert cli.main(["--json"]) == cli.UNUSABLE
        found = json.loads(capsys.readouterr().out)
        assert cli.main([]) == cli.UNUSABLE
        assert "broken of my-policies 1.0 cannot be used" in capsys.readouterr().out
    assert found["contract"] == 1
    (mine,) = [row for row in found["policies"] if row["name"] == "mine"]
    assert (mine["block"], mine["parameters"][0]["name"]) == ("outside.mine", "gainTokens")
    assert found["unusable"][0]["name"] == "broken"


def test_an_unknown_one_is_an_error(capsys) -> None:
    assert cli.main(["yours"]) == 2
    assert "Unknown policy 'yours', known are conductor" in capsys.readouterr().err


RESERVED = ("all", "pull", "migration", "engine_priority")
"""Names that options use for something else."""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("My-Policy", "'My-Policy' is no name of a policy: small letters, digits and _"),
        *(
            (name, f"Perilune uses the name '{name}' itself: choose another name")
            for name in ("ear", *RESERVED)
        ),
    ],
)
def test_what_is_wrong_with_a_name_is_said(tmp_path: Path, name: str, says: str, capsys) -> None:
    assert new.main(["new", name, "--folder", str(tmp_path / "x")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys) -> None:
    (tmp_path / PYPROJECT).write_text("mine")
    assert new.main(["new", "mine", "--folder", str(tmp_path)]) == 2
    assert "is there and not empty" in capsys.readouterr().err
    assert (tmp_path / PYPROJECT).read_text() == "mine"


@pytest.mark.processes
@pytest.mark.parametrize(
    "by_pip",
    [pytest.param(True, marks=pytest.mark.heavy, id="as pip installs it"), pytest.param(False, id="wheel")],
)
def test_a_new_package_passes_its_tests_and_is_found(tmp_path: Path, capsys, by_pip: bool) -> None:
    """As its README says, but in a folder of its own, as an image would have it; or as a wheel."""
    folder, site, dist = tmp_path / "mine", tmp_path / "site", tmp_path / "dist"
    assert new.main(["new", "least_busy", "--folder", str(folder)]) == 0
    assert all(Path(path).is_file() for path in capsys.readouterr().out.splitlines())
    if by_pip:
        _pip("wheel", "--wheel-dir", str(dist), str(folder))
    else:
        built = _ran(
            site, folder, "-c", f"from hatchling.build import build_wheel; build_wheel({str(dist)!r})"
        )
        assert built.returncode == 0, built.stderr
    (path,) = dist.glob("least_busy_policy-*.whl")
    if by_pip:
        _pip("install", "--no-compile", "--target", str(site), str(path))
        path = site
    tests = _ran(path, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests"))
    assert tests.returncode == 0, tests.stdout + tests.stderr
    shown = _ran(path, tmp_path, "-m", "perilune_lab.cli", "policies", "least_busy")
    assert "least_busy, from least-busy-policy 0.1.0" in shown.stdout, shown.stderr
    assert "gainSeconds" in shown.stdout
    assert "A session leaves its host only if that is predicted" in " ".join(shown.stdout.split())


def _pip(command: str, *args: str) -> None:
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", command, *alone, *args], check=True)


def _ran(path: Path, cwd: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with a package on its path."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True)

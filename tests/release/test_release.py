"""A release states one version everywhere, and its files can be made again byte for byte."""

import json
import re
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from api_server import program
from release import __main__ as release
from release import sbom

ROOT = Path(__file__).parents[2]
LOCK = f"""\
# made by a program
Aiohttp==3.14.5 ; python_version > "3" \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
    # via perilune
yarl==1.0
"""
STATED = {"version of pyproject.toml": "1.2.0", "version of Chart.yaml": "1.2.0"}


def test_this_checkout_states_one_version_everywhere() -> None:
    assert len(set(release.versions(ROOT).values())) == 1


def test_a_tag_that_fits_names_the_version() -> None:
    assert release.check("v1.2.0", STATED, "## [1.2.0] - 2026-01-01") == "1.2.0"


@pytest.mark.parametrize(
    ("tag", "changelog", "problem"),
    [
        pytest.param("v1.3.0", "## [1.3.0]", "version of Chart.yaml is 1.2.0", id="another version"),
        pytest.param("v1.2.0", "## [Unreleased]", "no section", id="no notes for users"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused_with_the_place(tag: str, changelog: str, problem: str) -> None:
    with pytest.raises(release.ReleaseError, match=problem):
        release.check(tag, STATED, changelog)


def test_the_bill_of_materials_lists_every_locked_package_with_its_hashes() -> None:
    first, second = sbom.document("1.2.0", LOCK)["components"]
    assert (first["purl"], second["purl"]) == ("pkg:pypi/aiohttp@3.14.5", "pkg:pypi/yarl@1.0")
    assert [h["content"] for h in first["hashes"]] == ["a" * 64, "b" * 64]
    assert second["hashes"] == []


def test_the_images_packages_are_all_listed_with_hashes() -> None:
    lock = (ROOT / "requirements-image.lock").read_text()
    components = sbom.document("1.2.0", lock)["components"]
    assert len(components) == sum(line[:1].isalnum() for line in lock.splitlines())
    assert {"aiohttp", "msgspec", "grpcio"} <= {c["name"] for c in components}
    assert all(c["hashes"] for c in components)


def test_a_rehearsal_makes_every_file_with_its_checksum(tmp_path: Path) -> None:
    assert release.main(["--helm", str(program("helm")), "--out", str(tmp_path)]) == 0
    (version,) = set(release.versions(ROOT).values())
    made = {path.name: path for path in tmp_path.iterdir()}
    assert set(made) == {
        f"perilune-{version}-py3-none-any.whl",
        f"perilune-{version}.tgz",
        f"perilune-{version}.cdx.json",
        "SHA256SUMS",
    }
    for line in made.pop("SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert sha256(made[name].read_bytes()).hexdigest() == digest
    assert json.loads(made[f"perilune-{version}.cdx.json"].read_text())["bomFormat"] == "CycloneDX"


def test_the_chart_names_the_images_by_their_digests(tmp_path: Path) -> None:
    digest, engine = f"sha256:{'a' * 64}", f"ghcr.io/perilune/perilune-engine@sha256:{'b' * 64}"
    packed = release.chart(tmp_path, digest, engine)
    command = [str(program("helm")), "template", "r", str(packed), "--kube-version=1.36"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"--image=ghcr.io/perilune/perilune@{digest}" in made
    assert f"--simulated-image={engine}" in made


def test_the_workflow_publishes_images_before_the_chart_that_names_them() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    (chart,) = [
        name for name, job in jobs.items() if any("helm push" in s.get("run", "") for s in job["steps"])
    ]
    (images,) = [
        name for name, job in jobs.items() if any("build-push" in s.get("uses", "") for s in job["steps"])
    ]
    assert jobs[chart]["needs"] == images
    assert "needs" not in jobs[images]
    outputs = jobs[images]["outputs"]
    assert {"image", "engine"} == outputs.keys()
    assert all(".outputs.digest" in value for value in outputs.values())


def test_bytecode_in_images_outlives_that_a_release_changes_the_times_of_files() -> None:
    """Otherwise each start of a pod would compile all sources again, because nothing can be written there."""
    recipe, workflow = (ROOT / "Dockerfile").read_text(), (ROOT / ".github/workflows/release.yml").read_text()
    assert "rewrite-timestamp=true" in workflow
    stages = recipe.split("\nFROM ")
    installing = [stage for stage in stages if "RUN ${INSTALL}" in stage]
    assert len(installing) == 2
    assert all(stage.rindex("${COMPILE}") > stage.rindex("pip uninstall") for stage in installing)
    assert re.search(r'COMPILE="[^"]* -f --invalidation-mode unchecked-hash /opt/perilune/lib"', recipe)


def test_the_workflow_publishes_what_the_rehearsal_makes() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True]["push"]["tags"] == ["v*"]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    assert 'python -m release --tag "$GITHUB_REF_NAME"' in commands
    images = [step["with"] for step in steps if "build-push-action" in step.get("uses", "")]
    assert {image.get("target", "default") for image in images} == {"default", "engine"}
    assert all(image["sbom"] is True and image["provenance"] == "mode=max" for image in images)

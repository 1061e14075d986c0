"""Makes the files of a release: `python -m release --tag v1.2.3 --helm PROGRAM --out FOLDER`.

The chart names the images by their digests, where these are given (`--image`): images are published before
the chart that names them, and a tag that is moved later changes nothing.

Wheel, chart, and the bill of materials of the images' Python packages, with a checksum of each. The wheel is
built twice and must be the same, byte for byte. Images are built where there is a container builder
(.github/workflows/release.yml). Nothing is published from here.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import yaml

from release import sbom

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "perilune"


class ReleaseError(Exception):
    """The release cannot be made; the message says why, and what to change."""


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version by each place that states it."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((root / "charts/perilune/Chart.yaml").read_text())
    return {
        "version of pyproject.toml": project["version"],
        "version of Chart.yaml": chart["version"],
        "appVersion of Chart.yaml": chart["appVersion"],
    }


def check(tag: str, stated: Mapping[str, str], changelog: str) -> str:
    """Return the version that the tag names. Raises ReleaseError if another is stated anywhere, or the
    changelog has no section for it."""
    version = tag.removeprefix("v")
    wrong = [f"{place} is {value}" for place, value in stated.items() if value != version]
    if wrong:
        raise ReleaseError(f"the tag is {tag}, but {', '.join(wrong)}")
    if f"## [{version}]" not in changelog:
        raise ReleaseError(f"CHANGELOG.md has no section [{version}]: rename Unreleased")
    return version


def wheel(folder: Path, commit_time: str) -> Path:
    """Build the wheel. `commit_time` in Unix seconds is the time of all files in it."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    _run(command, {"SOURCE_DATE_EPOCH": commit_time})
    (built,) = folder.glob("*.whl")
    return built


def with_digests(values: str, image: str, engine: str) -> str:
    """Return the chart's values with the digests of its two images. `engine`: that of the simulated engine's,
    with its repository. Empty ones change nothing."""
    lines = {'  digest: ""': f'  digest: "{image}"', 'simulatedImage: ""': f'simulatedImage: "{engine}"'}
    for old, new in lines.items():
        if values.count(old) != 1:
            raise ReleaseError(f"values.yaml has no single line `{old.strip()}`")
        values = values.replace(old, new)
    return values


def chart(folder: Path, image: str, engine: str) -> Path:
    """Return a copy of the chart that names the images by their digests."""
    copy = Path(shutil.copytree(CHART, folder / CHART.name))
    values = copy / "values.yaml"
    values.write_text(with_digests(values.read_text(), image, engine))
    return copy


def make(version: str, out: Path, helm: str, image: str = "", engine: str = "") -> list[Path]:
    """Write all files into `out` and return them. `image`, `engine`: as in with_digests. Raises ReleaseError
    when a program fails."""
    out.mkdir(parents=True, exist_ok=True)
    commit_time = _run(["git", "log", "-1", "--format=%ct"]).strip()
    built = wheel(out, commit_time)
    with tempfile.TemporaryDirectory() as again:
        if wheel(Path(again), commit_time).read_bytes() != built.read_bytes():
            raise ReleaseError("two builds of the wheel differ")
    with tempfile.TemporaryDirectory() as folder:
        packed = chart(Path(folder), image, engine)
        _run([helm, "lint", "--strict", str(packed)])
        _run([helm, "package", str(packed), "--destination", str(out)])
    listed = out / f"perilune-{version}.cdx.json"
    lock = (ROOT / "requirements-image.lock").read_text()
    listed.write_text(json.dumps(sbom.document(version, lock), indent=1) + "\n")
    files = [built, out / f"perilune-{version}.tgz", listed]
    sums = "".join(f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (out / "SHA256SUMS").write_text(sums)
    return [*files, out / "SHA256SUMS"]


def _run(command: Sequence[str], environment: Mapping[str, str] = {}) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description="Make the files of a release.")
    parser.add_argument("--tag", help="the tag, such as v1.2.3; without it, the version that is stated now")
    parser.add_argument("--image", default="", metavar="sha256:…", help="digest of the published image")
    parser.add_argument(
        "--engine-image",
        default="",
        metavar="REPOSITORY@sha256:…",
        help="the published image of the simulated engine",
    )
    parser.add_argument("--helm", default="helm", metavar="PROGRAM")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release", metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        stated = versions()
        if args.tag:
            version = check(args.tag, stated, (ROOT / "CHANGELOG.md").read_text())
        else:
            now = stated["version of pyproject.toml"]
            version = check(now, stated, f"## [{now}]")
        for file in make(version, args.out, args.helm, args.image, args.engine_image):
            print(f"{file} ({file.stat().st_size:,} bytes)")
    except (ReleaseError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

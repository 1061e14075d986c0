"""Make what is generated: `python -m protos.generate [--check]`, from the repository root.

Writes `protos/perilune_api/*_pb2.py` and `.pyi` from the .proto files, the CustomResourceDefinition
(`perilune_api.crdgen`), once for kubectl (`crds/`) and once for the chart, `docs/configuration.md`
(`perilune_api.reference`), and what `charts/` makes for the chart. With --check nothing is written;
the exit status is 1 and a line names the file when a committed file differs from what would be written. Takes
about a second. No gRPC stubs are made: the servers register their methods by name.
"""

import argparse
import importlib.resources
import sys
import tempfile
from pathlib import Path

from charts import alerts, dashboards, readme
from grpc_tools import protoc

from perilune_api import crdgen, reference

HERE = Path(__file__).resolve().parent
SOURCES = ("extproc.proto", "envoy_gateway.proto")
TARGET = HERE / "perilune_api"
CRD = "inferencepools.perilune.dev.yaml"
CRD_FOLDERS = (HERE.parent / "crds", HERE.parent / "charts" / "perilune" / "crds")
CHART_FILES = HERE.parent / "charts" / "perilune" / "files"
CONFIGURATION = HERE.parent / "docs" / "configuration.md"


def generate() -> dict[Path, bytes]:
    """Return the content of each target path. Raises RuntimeError when protoc refuses the source."""
    bundled = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as out:
        arguments = ["protoc", f"-I{HERE}", f"-I{bundled}", f"--python_out={out}", f"--pyi_out={out}"]
        if protoc.main([*arguments, *SOURCES]) != 0:
            raise RuntimeError(f"protoc refused one of {', '.join(SOURCES)}")
        files = {TARGET / file.name: file.read_bytes() for file in sorted(Path(out).iterdir())}
    files.update(dict.fromkeys((folder / CRD for folder in CRD_FOLDERS), crdgen.generate()))
    files[CONFIGURATION] = reference.page()
    for dashboard in dashboards.DASHBOARDS:
        files[CHART_FILES / "dashboards" / f"{dashboard.uid}.json"] = dashboards.document(dashboard)
    files[CHART_FILES / "alerts.yaml"] = alerts.document()
    files[readme.CHART / "README.md"] = readme.page()
    return files


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m protos.generate", description="Generate protobuf code, the CRD and the reference."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    check: bool = parser.parse_args(argv).check
    files = generate()
    stale = [path for path, code in files.items() if not path.exists() or path.read_bytes() != code]
    for path in stale:
        if check:
            print(f"{path.relative_to(HERE.parent)} is stale: run `make generate`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[path])
            print(f"{path.relative_to(HERE.parent)} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

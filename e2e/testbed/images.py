"""Images without a registry: OCI archives made here, and one image store that all nodes share.

Steps: debootstrap → a base layer, once; layers + a few JSON files → an OCI archive (`write_archive`);
archives → an image store, by a containerd of its own in a machine that lives for the import; a node's store
is that one by hard links (layers are only ever read; its two databases are copied), so eight nodes cost one
node's space and start with all images in a second. Of a changed image only the new
layers are unpacked.
"""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import programs
from testbed.machines import Machine
from testbed.paths import IMAGES, exclusive
from testbed.shell import run, step, succeeds, until

PAUSE = "perilune.test/pause:1"
ENVOY = "perilune.test/envoy:1"
ENVOY_GATEWAY = "perilune.test/envoy-gateway:1"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")
_UNUSED_IN_BASE = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
SUITE = "trixie"
"""Debian 13, as the Dockerfile's base."""
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_STORE = IMAGES / "store"


@dataclass(frozen=True, slots=True)
class Layer:
    tar: Path
    digest: str
    size: int


def layer(tar: Path) -> Layer:
    with tar.open("rb") as file:
        return Layer(tar, "sha256:" + hashlib.file_digest(file, "sha256").hexdigest(), tar.stat().st_size)


def files_layer(to: Path, files: Mapping[str, Path]) -> Layer:
    """Return a layer of executable files and folders, the same bytes for the same files."""
    with tarfile.open(to, "w") as tar:
        for name, source in sorted(files.items()):
            tar.add(source, name, filter=_anonymous)
    return layer(to)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.name.endswith(".pyc"):
        return None
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_archive(
    name: str, to: Path, layers: Sequence[Layer], entrypoint: Sequence[str], env: Sequence[str] = ()
) -> None:
    """Write an OCI archive that `ctr images import` and buildah read."""
    config = _json(
        architecture="amd64",
        os="linux",
        config={"Entrypoint": list(entrypoint), "Env": [_PATH, *env]},
        rootfs={"type": "layers", "diff_ids": [part.digest for part in layers]},
        history=[{"created_by": "testbed"} for _ in layers],  # buildah counts layers by it
    )
    oci = "application/vnd.oci.image"
    parts = [
        {"mediaType": f"{oci}.layer.v1.tar", "digest": part.digest, "size": part.size} for part in layers
    ]
    manifest = _json(
        schemaVersion=2,
        mediaType=f"{oci}.manifest.v1+json",
        config={"mediaType": f"{oci}.config.v1+json", "digest": _digest(config), "size": len(config)},
        layers=parts,
    )
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    about = {"mediaType": f"{oci}.manifest.v1+json", "digest": _digest(manifest), "size": len(manifest)}
    index = _json(schemaVersion=2, manifests=[{**about, "annotations": names}])
    with tarfile.open(to, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", index)
        for blob in (config, manifest):
            _add(tar, _blob(_digest(blob)), blob)
        for part in layers:
            member = tarfile.TarInfo(_blob(part.digest))
            member.size = part.size
            with part.tar.open("rb") as file:
                tar.addfile(member, file)


def _json(**document: Any) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def base() -> Layer:
    """Debian with Python, as debootstrap makes it; once per machine, about 45 s."""
    tar = IMAGES / f"{SUITE}.tar"
    with exclusive(SUITE):
        if not tar.exists():
            with step("making a Debian base image, once"):
                _bootstrap(tar)
    return layer(tar)


def _bootstrap(tar: Path) -> None:
    root, new = IMAGES / SUITE, tar.with_suffix(".new")
    succeeds(["umount", root / "proc"])  # which a debootstrap that was killed leaves there
    shutil.rmtree(root, ignore_errors=True)
    run(["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", SUITE, root], timeout_s=1200)
    for folder in _UNUSED_IN_BASE:
        shutil.rmtree(root / folder, ignore_errors=True)
    run(["tar", "-C", root, "--sort=name", "--one-file-system", "-cf", new, "."])
    new.rename(tar)
    shutil.rmtree(root)


def archives(envoy: Path) -> Iterator[Path]:
    """Yield the cluster's own images: pause, Envoy, Envoy Gateway."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    yield archive(PAUSE, busybox, "busybox", "sleep", "2147483647")
    yield archive(ENVOY, envoy, "envoy", on_debian=True)
    yield archive(ENVOY_GATEWAY, programs.path("envoy-gateway"), "envoy-gateway", on_debian=True)


def archive(name: str, program: Path, command: str, *arguments: str, on_debian: bool = False) -> Path:
    """Return an image that runs one program as `command`. Make it again when the program has changed."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    place, file = f"usr/local/bin/{command}", name.split("/")[-1].split(":")[0]
    entrypoint = (f"/{place}", *arguments)
    to = IMAGES / f"{file}.tar"
    made_of = f"{program} {fingerprint(program)} {entrypoint} {SUITE}"
    recipe = to.with_suffix(".recipe")
    with exclusive(file):
        if not (to.exists() and recipe.exists() and recipe.read_text() == made_of):
            own = files_layer(to.with_suffix(".layer"), {place: program})
            write_archive(name, to, [base(), own] if on_debian else [own], entrypoint)
            own.tar.unlink()
            recipe.write_text(made_of)
    return to


def fingerprint(file: Path) -> str:
    """Return a text that changes whenever the file is written again."""
    about = file.stat()
    return f"{about.st_size}-{about.st_mtime_ns}"


def make_store(home: Path, wanted: Sequence[Path]) -> None:
    """Bring the image store up to date with these archives. The caller is a cgroup member."""
    with exclusive("store"):
        _make_store(home, wanted)


def _make_store(home: Path, wanted: Sequence[Path]) -> None:
    inventory = _STORE / "INVENTORY"
    has: dict[str, str] = json.loads(inventory.read_text()) if inventory.exists() else {}
    needed = {str(archive): fingerprint(archive) for archive in wanted}
    missing = [archive for archive in wanted if has.get(str(archive)) != needed[str(archive)]]
    if not missing:
        return
    with step(f"unpacking {len(missing)} image{'s' * (len(missing) > 1)}"):
        machine = Machine("images", home / "images")
        root = machine.home / "lib" / "containerd"
        root.parent.mkdir(parents=True)
        if inventory.exists():
            _STORE.rename(root)  # a killed run leaves no store, never half a one
        machine.start()
        machine.daemon(["containerd"])
        until(
            lambda: succeeds(machine.inside(["ctr", "version"])),
            f"containerd runs, see {machine.home}/containerd.log",
            timeout_s=30,
        )
        for archive in missing:
            load(machine, archive)
        machine.power_off()
        shutil.rmtree(_STORE, ignore_errors=True)
        root.rename(_STORE)
        inventory.write_text(json.dumps(has | needed, indent=1))


def load(machine: Machine, archive: Path) -> None:
    """Import an archive into a running machine's containerd."""
    machine.run(["ctr", "-n", "k8s.io", "images", "import", archive], timeout_s=300)


def populate(folder: Path) -> None:
    """Make `folder` a containerd root with every image of the store."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive("store"):
        run(["cp", "--archive", "--link", _STORE, folder])
        for database in _DATABASES:
            (folder / database).unlink()
            shutil.copy2(_STORE / database, folder / database)

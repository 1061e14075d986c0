"""Programs of the cluster: Go programs built once per machine, packages from Debian.

`KUBEBUILDER_ASSETS` (envtest's convention), when set, is looked into first. What is missing is built from
pinned versions with Go's own checksums into the cache: about ten minutes on two cores, once; afterwards
nothing. `python -m testbed.programs` builds what the operator's tests need (`make api-server`), or the
programs that it is given (`make collector`).
"""

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from testbed.paths import BIN, CERT_MANAGER, COLLECTOR, CONFORMANCE, GO_BUILD, GO_MODULES, TOOLS
from testbed.shell import ClusterError, run, step

KUBERNETES = "v1.36.2"
ENVOY_GATEWAY = "v1.9.1"
_GATEWAY_MODULE = "github.com/envoyproxy/gateway"
LEADER_WORKER_SET = ("sigs.k8s.io/lws", "v0.8.0")
LWS_FOLDER = GO_MODULES / "@".join(LEADER_WORKER_SET)
AI_GATEWAY = ("github.com/envoyproxy/ai-gateway", "v1.0.0")
AI_GATEWAY_FOLDER = GO_MODULES / "@".join(AI_GATEWAY)
INFERENCE_EXTENSION = ("sigs.k8s.io/gateway-api-inference-extension", "v1.6.0")
PICKER = (INFERENCE_EXTENSION[0], "v1.5.0")
PICKER_FOLDER = GO_MODULES / "@".join(PICKER)
KUBE_ROUTER = ("github.com/cloudnativelabs/kube-router/v2", "v2.1.0")
KUBE_ROUTER_FOLDER = GO_MODULES / "@".join(KUBE_ROUTER)
CERT_MANAGER_MODULE = ("github.com/cert-manager/cert-manager", "v1.19.1")
KEDA = ("github.com/kedacore/keda/v2", "v2.17.2")
CONFORMANCE_SUITE = (f"{INFERENCE_EXTENSION[0]}/conformance", INFERENCE_EXTENSION[1])
_GATEWAY_API_CONFORMANCE = ("sigs.k8s.io/gateway-api/conformance", "v1.6.1")
_STRIP = ("-s", "-w")
_VERSION = "k8s.io/component-base/version"
_KUBERNETES_FLAGS = (
    *_STRIP,
    *(
        "-X",
        f"{_VERSION}.gitVersion={KUBERNETES}",
        "-X",
        f"{_VERSION}.gitMajor=1",
        "-X",
        f"{_VERSION}.gitMinor=36",
    ),
)


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    package: str
    version: str
    flags: tuple[str, ...] = field(default=_STRIP)
    module: Path | None = None
    """The folder whose go.mod pins the whole tree, ours or its own; else it is installed at its version."""


def _kubernetes(name: str) -> Program:
    return Program(name, f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, _KUBERNETES_FLAGS, module=TOOLS)


PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "go.etcd.io/etcd/server/v3", "v3.6.8", module=TOOLS),
        *map(_kubernetes, ("kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler")),
        *map(_kubernetes, ("kubelet", "kube-proxy")),
        Program("coredns", "github.com/coredns/coredns", "v1.12.4"),
        Program("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0"),
        Program("envoy-gateway", f"{_GATEWAY_MODULE}/cmd/envoy-gateway", ENVOY_GATEWAY),
        Program("kwok", "sigs.k8s.io/kwok/cmd/kwok", "v0.8.0"),
        Program("lws", "./cmd", LEADER_WORKER_SET[1], module=LWS_FOLDER),
        Program("otel-collector", ".", "v0.165.0", module=COLLECTOR),
        Program("ai-gateway", "./cmd/controller", AI_GATEWAY[1], module=AI_GATEWAY_FOLDER),
        Program("epp", "./cmd/epp", PICKER[1], module=PICKER_FOLDER),
        Program("kube-router", "./cmd/kube-router", KUBE_ROUTER[1], module=KUBE_ROUTER_FOLDER),
        Program("cert-manager", ".", CERT_MANAGER_MODULE[1], module=CERT_MANAGER),
        Program("conformance", ".", CONFORMANCE_SUITE[1], module=CONFORMANCE),
        Program(
            "echo-basic",
            f"{_GATEWAY_API_CONFORMANCE[0]}/echo-basic",
            _GATEWAY_API_CONFORMANCE[1],
            module=CONFORMANCE,
        ),
    )
}
CLUSTER = (
    *("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy", "coredns", "helm", "envoy-gateway"),
)
API_SERVER = (
    *("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler"),
    *("helm", "kwok", "lws"),
)
"""What the operator's tests and its benchmark need."""
CHART = GO_MODULES / f"{_GATEWAY_MODULE}@{ENVOY_GATEWAY}" / "charts" / "gateway-helm"

PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "ctr": "containerd",
    "nft": "nftables",
    "iptables": "iptables",
    "ipset": "ipset",
    "ip": "iproute2",
    "tc": "iproute2",
    "busybox": "busybox-static",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
"""Program → its Debian package."""


def path(name: str) -> Path:
    """Return where a program lies, or will lie once built."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    given = Path(assets) / name if assets else None
    return given if given is not None and given.exists() else BIN / name


def missing(names: tuple[str, ...] = CLUSTER) -> list[str]:
    """Those that have to be built first."""
    return [
        name
        for name in names
        if path(name).parent == BIN and not (_stamp(name).exists() and path(name).exists())
    ]


def _stamp(name: str) -> Path:
    """Its existence says that the program is of this version."""
    return BIN / ".built" / f"{name}@{PROGRAMS[name].version}"


def ensure(names: tuple[str, ...]) -> None:
    """Build what is missing. Raises ClusterError without Go, or when a build fails."""
    for name in missing(names):
        program = PROGRAMS[name]
        if shutil.which("go") is None:
            raise ClusterError(
                f"{name} {program.version} is not in {BIN}, and there is no Go (>= 1.26) to build it with;"
                " set KUBEBUILDER_ASSETS to a folder that has it"
            )
        with step(f"building {name} {program.version}, once"):
            _build(program)
            _stamp(name).parent.mkdir(exist_ok=True)
            _stamp(name).touch()


def _build(program: Program) -> None:
    BIN.mkdir(parents=True, exist_ok=True)
    own = {"GOMODCACHE": str(GO_MODULES), "GOCACHE": str(GO_BUILD), "GOBIN": str(BIN), "GOWORK": "off"}
    env = {**os.environ, **own, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
    how = ("-trimpath", "-ldflags", " ".join(program.flags))
    if program.module:
        args = ["build", *how, "-o", str(BIN / program.name), program.package]
    else:
        args = ["install", *how, f"{program.package}@{program.version}"]
    run(["go", *args], env=env, cwd=program.module or Path("/"), timeout_s=3600)


def module(path: str, version: str) -> Path:
    """Return a Go module's files, downloaded once. go checks them against its checksum database."""
    folder = GO_MODULES / f"{path}@{version}"
    if not folder.exists():
        with step(f"downloading {path} {version}, once"):
            env = {**os.environ, "GOMODCACHE": str(GO_MODULES), "GOFLAGS": "-modcacherw"}
            run(["go", "mod", "download", f"{path}@{version}"], env=env, cwd=Path("/"))
    return folder


def ensure_api_server() -> None:
    """Build what the operator's tests need, and download the modules whose CRDs they install."""
    module(*LEADER_WORKER_SET)
    ensure(API_SERVER)
    module(_GATEWAY_MODULE, ENVOY_GATEWAY)
    module(*INFERENCE_EXTENSION)
    module(*PICKER)
    module(*KEDA)


def ensure_packages() -> None:
    """Install missing Debian packages when root. Raises ClusterError with the command to type otherwise."""
    missing = sorted({package for program, package in PACKAGES.items() if not _found(program)})
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"missing programs; as root: {' '.join(command)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"installing {' '.join(missing)}"):
        run(["apt-get", "update"], env=env)
        run(command, env=env)


def _found(program: str) -> bool:
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return (
        Path(program).exists() if program.startswith("/") else shutil.which(program, path=search) is not None
    )


if __name__ == "__main__":
    try:
        ensure(tuple(sys.argv[1:])) if sys.argv[1:] else ensure_api_server()
    except ClusterError as error:
        sys.exit(f"programs: {error}")

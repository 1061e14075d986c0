"""The control plane, in the machine `control`: etcd, API server, controller manager, scheduler, CoreDNS.

Certificates as a real cluster has them: kubelets are `system:node:…`, so the Node authorizer decides what
they may read. Dead nodes are noticed fast (20 s instead of 50 s), everything else is Kubernetes' default.
"""

from pathlib import Path

from testbed import network, programs
from testbed.kube import Kube
from testbed.machines import Machine
from testbed.pki import Pki
from testbed.shell import ClusterError, until

PORT = 6443
SERVER = f"https://{network.CONTROL}:{PORT}"
NODE_GRACE_S = 20
_ETCD = "http://127.0.0.1:2379"
_COREFILE = """.:53 {{
  bind {address}
  errors
  cache 30
  kubernetes cluster.local in-addr.arpa {{
    ttl 30
    kubeconfig {kubeconfig} perilune
  }}
}}
"""
"""`cache` and `ttl` are those of kubeadm: for so long it also remembers that a name was not there."""


class ControlPlane:
    def __init__(self, machine: Machine, home: Path) -> None:
        self.machine = machine
        self.pki = Pki(home / "pki")
        self.kubeconfig = home / "kubeconfig"
        self._home = home

    @property
    def kube(self) -> Kube:
        return Kube(self.machine.on_its_network(()), str(self.kubeconfig))

    @property
    def ready(self) -> bool:
        try:
            return self.kube.ctl("get", "--raw", "/readyz", timeout_s=5) == "ok"
        except ClusterError:
            return False

    def identity(self, file: str, name: str, group: str = "") -> Path:
        """Return a kubeconfig for `name`, certificate included."""
        self.pki.certificate(file, name, group)
        to = self._home / f"{file}.kubeconfig"
        self.pki.kubeconfig(to, SERVER, file)
        return to

    def start(self) -> None:
        self._make_identities()
        self._daemon("etcd", *_etcd(self._home))
        self.start_api_server()
        until(lambda: self.ready, f"the API server is ready, see {self._log('kube-apiserver')}", timeout_s=90)
        self._daemon("kube-controller-manager", *self._controller_manager())
        self._daemon(
            *("kube-scheduler", f"--kubeconfig={self._home / 'kube-scheduler.kubeconfig'}"),
            *("--leader-elect=false", "--secure-port=0"),
        )
        corefile = self._home / "Corefile"
        corefile.write_text(_COREFILE.format(address=network.CONTROL, kubeconfig=self.kubeconfig))
        self._daemon("coredns", "-conf", str(corefile))

    def start_api_server(self) -> None:
        pki = self.pki.path
        self._daemon(
            "kube-apiserver",
            *(f"--etcd-servers={_ETCD}", f"--secure-port={PORT}", f"--advertise-address={network.CONTROL}"),
            *(f"--service-cluster-ip-range={network.SERVICES}", "--authorization-mode=Node,RBAC"),
            *(f"--tls-cert-file={pki('apiserver.crt')}", f"--tls-private-key-file={pki('apiserver.key')}"),
            *(f"--client-ca-file={pki('ca.crt')}", "--anonymous-auth=false", "--profiling=false"),
            *(f"--cert-dir={self._home / 'apiserver'}", "--allow-privileged=true"),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki('sa.pub')}",
            f"--service-account-signing-key-file={pki('sa.key')}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={pki('admin.crt')}",
            f"--kubelet-client-key={pki('admin.key')}",
            f"--kubelet-certificate-authority={pki('ca.crt')}",
        )

    def _controller_manager(self) -> tuple[str, ...]:
        pki = self.pki.path
        return (
            *("--leader-elect=false", "--secure-port=0"),
            f"--kubeconfig={self._home / 'kube-controller-manager.kubeconfig'}",
            *("--kube-api-qps=500", "--kube-api-burst=500", "--use-service-account-credentials=true"),
            *(f"--service-account-private-key-file={pki('sa.key')}", f"--root-ca-file={pki('ca.crt')}"),
            *(f"--cluster-signing-cert-file={pki('ca.crt')}", f"--cluster-signing-key-file={pki('ca.key')}"),
            *(f"--service-cluster-ip-range={network.SERVICES}", f"--cluster-cidr={network.PODS}"),
            *(f"--node-monitor-grace-period={NODE_GRACE_S}s", "--node-monitor-period=2s"),
        )

    def _make_identities(self) -> None:
        self.pki.make_ca()
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        addresses = ("127.0.0.1", network.CONTROL, network.API_SERVICE)
        self.pki.certificate(
            *("apiserver", "kube-apiserver"),
            names=[*(f"DNS:{n}" for n in names), *(f"IP:{a}" for a in addresses)],
            server=True,
        )
        self.pki.certificate("admin", "admin", "system:masters")
        self.pki.kubeconfig(self.kubeconfig, SERVER, "admin")
        for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            self.identity(name, f"system:{name}")

    def _daemon(self, name: str, *args: str) -> None:
        self.machine.daemon([programs.path(name), *args], name)

    def _log(self, name: str) -> Path:
        return self.machine.home / f"{name}.log"


def _etcd(home: Path) -> tuple[str, ...]:
    urls = (f"--listen-client-urls={_ETCD}", f"--advertise-client-urls={_ETCD}")
    peers = ("--listen-peer-urls=http://127.0.0.1:2380",)
    return (f"--data-dir={home / 'etcd'}", *urls, *peers, "--unsafe-no-fsync", "--log-level=warn")

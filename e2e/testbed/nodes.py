"""A node: a machine with Debian's containerd, a real kubelet, kube-proxy; labels and GPUs of an H20 server.

GPUs are an extended resource written to the node's status: a kubelet keeps it, and the scheduler counts it.
"""

import json
from typing import Any

from testbed import cgroups, network, programs
from testbed.control_plane import ControlPlane
from testbed.images import PAUSE, populate
from testbed.machines import Machine
from testbed.network import Site
from testbed.shell import succeeds, until

GPUS = 8
GPU_PRODUCT = "NVIDIA-H20"
ZONE = "z0"

_CONTAINERD = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  cni = {{bin_dir = "/usr/lib/cni", conf_dir = "{home}/cni"}}
  containerd = {{snapshotter = "overlayfs", runtimes = {{runc = {{runtime_type = "io.containerd.runc.v2"}}}}}}
"""


def labels(site: Site) -> dict[str, str]:
    """Return what an H20 server at this place says of itself."""
    return {
        "topology.kubernetes.io/zone": ZONE,
        "topology.kubernetes.io/rack": site.rack,
        "topology.kubernetes.io/spine": site.spine,
        "nvidia.com/gpu.product": GPU_PRODUCT,
        "nvidia.com/gpu.count": str(GPUS),
    }


def gpus(node: str) -> dict[str, Any]:
    """Return the Node with the status of one that has eight GPUs."""
    count = {"nvidia.com/gpu": str(GPUS)}
    status = {"capacity": count, "allocatable": count}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "status": status}


class Node:
    def __init__(self, cluster: str, machine: Machine, site: Site, control: ControlPlane) -> None:
        self.machine = machine
        self.site = site
        self._control = control
        self._cgroup = f"{cluster}/{site.node}"

    def prepare(self) -> None:
        """Prepare once: certificates, configuration, images."""
        home, name = self.machine.home, self.site.node
        (home / "cni").mkdir()
        (home / "cni" / "10-pods.conflist").write_text(json.dumps(self._cni()))
        (home / "containerd.toml").write_text(_CONTAINERD.format(pause=PAUSE, home=home))
        self._control.identity(name, f"system:node:{name}", "system:nodes")
        self._control.pki.certificate(f"{name}-serving", name, names=[f"IP:{self.site.address}"], server=True)
        (home / "resolv.conf").write_text("")
        (home / "kubelet.json").write_text(json.dumps(self._kubelet()))
        populate(home / "lib" / "containerd")

    def start(self) -> None:
        """Start its daemons; the machine is on and plugged in. The caller is a cgroup member."""
        home, name = self.machine.home, self.site.node
        cgroups.make(self._cgroup)
        self.machine.daemon(["containerd", "--config", home / "containerd.toml"])
        until(
            self._containerd_listens, f"containerd of {name} listens, see {home}/containerd.log", timeout_s=30
        )
        own = f"--kubeconfig={home.parent / name}.kubeconfig"
        self.machine.service(
            [
                *(programs.path("kubelet"), f"--config={home / 'kubelet.json'}", own),
                *(f"--hostname-override={name}", f"--node-ip={self.site.address}", "-v=1"),
            ]
        )
        self.machine.service(
            [
                *(programs.path("kube-proxy"), f"--kubeconfig={home.parent / 'kube-proxy.kubeconfig'}"),
                *(f"--hostname-override={name}", "--proxy-mode=nftables", f"--cluster-cidr={network.PODS}"),
                *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s"),
                "--conntrack-tcp-timeout-close-wait=0s",
            ]
        )

    @property
    def proxies(self) -> bool:
        """kube-proxy has written its rules."""
        return succeeds(self.machine.inside(["nft", "list", "table", "ip", "kube-proxy"]))

    def last_errors(self, count: int = 5) -> list[str]:
        """Return the last lines that kubelet and containerd logged as errors, at most `count` each."""
        kubelet = (self.machine.home / "kubelet.log").read_text(errors="replace").splitlines()
        containerd = (self.machine.home / "containerd.log").read_text(errors="replace").splitlines()
        return [
            *[line for line in kubelet if line.startswith(("E", "F"))][-count:],
            *[line for line in containerd if "level=error" in line or "level=fatal" in line][-count:],
        ]

    def _containerd_listens(self) -> bool:
        # the socket is made once all plugins are loaded
        return succeeds(self.machine.inside(["test", "-S", "/run/containerd/containerd.sock"]))

    def object(self) -> dict[str, Any]:
        """Return the Node, made before its kubelet registers it, so that it has its labels from the first
        moment."""
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.site.node,
                "labels": {"kubernetes.io/hostname": self.site.node, **labels(self.site)},
            },
        }

    def status(self) -> dict[str, Any]:
        """Its GPUs; a kubelet that starts on a new node resets them, so they come after it is Ready."""
        return gpus(self.site.node)

    def _cni(self) -> dict[str, Any]:
        # ptp: a pod is linked to its node only, so that two pods of one node, too, meet kube-proxy's rules
        ipam = {
            "type": "host-local",
            "ranges": [[{"subnet": self.site.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]}

    def _kubelet(self) -> dict[str, Any]:
        pki, name = self._control.pki.path, self.site.node
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": pki("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": pki(f"{name}-serving.crt"),
            "tlsPrivateKeyFile": pki(f"{name}-serving.key"),
            "clusterDNS": [network.CONTROL],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.machine.home / "resolv.conf"),
            "volumePluginDir": "/var/lib/kubelet/plugins",
            "evictionHard": {
                "memory.available": "10Mi",
                "nodefs.available": "1Mi",
                "imagefs.available": "1Mi",
            },
            # never: from 85 % of the disk on, every image that runs nowhere would go, and no registry has it
            "imageGCHighThresholdPercent": 100,
            "nodeLeaseDurationSeconds": 8,
            "nodeStatusUpdateFrequency": "5s",
            "nodeStatusReportFrequency": "1m",
            "serializeImagePulls": False,
            "maxPods": 110,
        }

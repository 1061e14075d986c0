"""Parts of the test cluster (`../cluster.py`): each file is one subject, imports point down this list.

cluster bring up, take down, status envoy_gateway Envoy Gateway from its own chart, and what it needs here
nodes containerd, kubelet and kube-proxy of a node; its labels and GPUs control_plane etcd, API server,
controller manager, scheduler, CoreDNS images images without a registry network racks and spines as bridges,
link rates, routes machines a machine: network, mount, PID, UTS and IPC namespaces with one init process
cgroups which processes are ours; v1 and v2 programs Go programs, built once per machine; Debian packages
pki, kube certificates and kubeconfigs; kubectl shell running programs, progress, waiting on conditions
paths where everything lies
"""

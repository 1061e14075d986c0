"""Parts of the test cluster (`../cluster.py`): each file is one subject, imports point down this list.

What scenarios use:

    direct           the API server and gateways' pages, read without a process for each question
    pool             a pool as a scenario sees it: object, pods, conditions, and a client that asks it
    operators        operators of the test's own, killed at a chosen write
    policies         NetworkPolicies enforced by an agent on each node
    cert_manager     cert-manager's controllers
    http             one request, one answer, with times; load that counts failures
    lanes            scenarios side by side, on a cluster each

What the cluster is made of:

    perilune         Perilune installed as a user does: Helm, our chart, a pool
    cluster          bring up, take down, status
    kind             the same on kind, where there is Docker
    conformance      the inference extension's conformance suite, with our gateways as its pickers
    ai_gateway       Envoy AI Gateway, with which Envoy Gateway takes InferencePools
    epp              the inference extension's own endpoint picker
    envoy_gateway    Envoy Gateway from its own chart, and what it needs here
    perilune_image   our own images, by the Dockerfile
    releases         an earlier release's chart and files
    nodes            containerd, kubelet and kube-proxy of a node; its labels and GPUs
    control_plane    etcd, API server, controller manager, scheduler, CoreDNS
    images           images without a registry
    network          racks and spines as bridges, link rates, routes
    machines         a machine: network, mount, PID, UTS and IPC namespaces with one init process
    netns            network namespaces by file descriptor
    cgroups          which processes are ours; v1 and v2
    pki, kube        certificates and kubeconfigs; kubectl
    programs         Go programs, built once per machine; Debian packages
    shell            running programs, progress, waiting on conditions
    paths            where everything lies
"""

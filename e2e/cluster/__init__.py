"""A real Kubernetes on one Debian machine, for the end-to-end tests.

The control plane runs on the host; each node is a set of namespaces (network, mount, pid, uts, ipc) with its
own containerd, kubelet and kube-proxy. `python -m cluster up` (with PYTHONPATH=e2e) builds what is missing,
starts everything and prints the path of a kubeconfig; `python -m cluster down` removes all of it.

Modules, bottom up: `settings` (names, addresses, folders), `shell` (running commands, errors, polling),
`go_binaries`, `daemons` (processes we own), `pki`, `network`, `cgroups`, `control_plane`, `node`,
`kubectl`, `base_image` and `images`, `dns`, `volumes`, `fake_gpus`, `service_url`, `artifacts`,
`preflight`, and `lifecycle` (up and down), which alone knows the order of things. Standard library only:
this code runs before anything is installed.
"""

from cluster.lifecycle import Cluster, connect, down, up
from cluster.settings import Settings
from cluster.shell import ClusterError

__all__ = ["Cluster", "ClusterError", "Settings", "connect", "down", "up"]

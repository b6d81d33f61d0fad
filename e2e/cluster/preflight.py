"""Check that this machine can run the cluster, and list what it lacks; the tests then fail, they never skip."""

from __future__ import annotations

import os
import socket

from cluster import cgroups
from cluster.settings import API_PORT, ETCD_CLIENT_PORT, ETCD_PEER_PORT, NodeSettings
from cluster.shell import ClusterError, find, poll, run

MODULES = ("overlay", "br_netfilter", "veth", "bridge", "nf_conntrack")

REMEDY = (
    "The end-to-end tests need root on a Linux machine that permits network, mount and pid namespaces, "
    "mounts and control groups; or a cluster of yours: ARGOSY_E2E_EXTERNAL=1 KUBECONFIG=..."
)

NAMESPACE_PROBE = """
set -eu
mount --make-rprivate /
mount -t tmpfs none /mnt
mkdir /mnt/lower /mnt/upper /mnt/work /mnt/merged
mount -t overlay overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work /mnt/merged
ip link set lo up
ip link add probe0 type bridge
ip link add probe1 type veth peer name probe2
iptables -t nat -L -n > /dev/null
test -e /proc/sys/net/bridge/bridge-nf-call-iptables
"""
"""The system calls of a node's start, tried once in namespaces that end with the probe."""


def check_permissions() -> None:
    """Raises ClusterError unless namespaces, mounts, links, iptables and control groups work here."""
    if os.geteuid() != 0:
        raise ClusterError(f"not running as root. {REMEDY}")
    if find("modprobe"):
        for module in MODULES:  # built in, loaded or absent: the probe below tells
            run("modprobe", "--quiet", module, check=False)
    probe = run(
        *("unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"),
        *("bash", "-c", NAMESPACE_PROBE),
        check=False,
    )
    if probe.returncode:
        raise ClusterError(f"namespaces or mounts are not permitted here:\n{probe.stderr.strip()}\n{REMEDY}")


def check_cgroups(node: NodeSettings) -> None:
    """Raises ClusterError unless control groups can be made; leaves none behind."""
    try:
        cgroups.create(node)
    except ClusterError as error:
        raise ClusterError(f"{error}. {REMEDY}") from None
    finally:
        cgroups.remove_node(node)


def wait_for_ports(timeout: float = 10) -> None:
    """Sockets of a killed run may outlive it a moment; someone else's do not go away."""
    for port in (ETCD_CLIENT_PORT, ETCD_PEER_PORT, API_PORT):

        def free(port: int = port) -> bool:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    raise ClusterError(f"port {port} is in use: {error}") from None
            return True

        poll(f"port {port} free", free, timeout)

"""A node: namespaces around its own containerd, kubelet and kube-proxy (`node_init.sh` is its process 1).

Killing that one process ends every process of the node at once, like a power failure; starting it again
is the machine's reboot. Images survive in the node's data folder; sockets, pod network state and, after a
`down`, the kubelet's folder do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster import cgroups, daemons
from cluster.go_binaries import CNI_PLUGINS, single_binary_tag
from cluster.kubectl import Kubectl
from cluster.settings import DNS_SERVICE_ADDRESS, POD_SUBNET, NodeSettings, Settings
from cluster.shell import ClusterError, poll, remove_tree, run

INIT = Path(__file__).with_name("node_init.sh")
LABELS = "nvidia.com/gpu.present=true"
MOUNT_POINTS = (
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/etc/cni/net.d",
    "/run/containerd",
    "/run/netns",
    "/var/log/pods",
    "/var/log/containers",
    "/var/lib/argosy",
)
"""Folders a node mounts its own over; they must exist on the host, where they stay untouched."""
OWN_FOLDERS = ("kubelet", "argosy", "disks")
"""Below a node's data folder, what belongs to one run: the kubelet's state, what pods keep in /var/lib/argosy, and the
disks of claims (`volumes.make_disk`)."""


def start(settings: Settings, binaries: Path, node: NodeSettings) -> None:
    """Boot a node, first or again. Its network namespace must exist."""
    cgroups.remove_node(node)
    cgroups.create(node)
    _write_files(settings, node)
    _make_mount_points(settings)
    environment = {
        "NODE": node.name,
        "BIN": str(binaries),
        "RUN": str(node.run),
        "DATA": str(node.data),
        "PKI": str(settings.pki),
        "LOGS": str(node_logs(settings, node)),
        "ADDRESS": node.address,
        "POD_SUBNETS": POD_SUBNET,
        "LABELS": LABELS,
        "VOLUMES": str(volume_table(settings)),
    }
    # nsenter, not `ip netns exec`: that mounts a fresh /sys, which would hide the control groups
    enter = ["nsenter", f"--net=/run/netns/{node.netns}"]
    unshare = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child"]
    daemons.start(settings, node.name, [*enter, *unshare, "bash", INIT], environment)
    poll(
        f"{node.name}'s containerd",
        lambda: ctr(node, "version", check=False).returncode == 0,
        timeout=120,
        interval=0.1,
    )


def kill(settings: Settings, node: NodeSettings) -> bool:
    """Pull the plug. Returns whether it was running."""
    return daemons.kill(settings, node.name)


def forget(settings: Settings, *, images: bool = False) -> None:
    """Delete what dead nodes leave on disk; with `images`, their image stores too."""
    for node in settings.possible_nodes:
        if images:
            remove_tree(node.data)
        else:
            for folder in OWN_FOLDERS:
                remove_tree(node.data / folder)
    created = settings.state / "created-folders"
    if created.exists():
        for line in created.read_text().splitlines():
            path = Path(line)
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        created.unlink()


def wait_ready(kubectl: Kubectl, node: NodeSettings, timeout: float = 300) -> None:
    kubectl.poll(f"{node.name} Ready", ("node", node.name), is_ready, timeout)


def is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def ctr(node: NodeSettings, *words: str, check: bool = True, timeout: float = 300) -> Any:
    """containerd's own client, through the socket that shows through from the node's folder."""
    return run(*ctr_argv(node, *words), check=check, timeout=timeout)


def ctr_argv(node: NodeSettings, *words: str) -> list[str]:
    return ["ctr", "--address", str(node.containerd_socket), "--namespace", "k8s.io", *words]


def inside(settings: Settings, node: NodeSettings, *words: str | Path) -> str:
    """Run a command in the node's mount, network and pid namespaces."""
    pid = daemons.alive(settings, node.name)
    if pid is None:
        raise ClusterError(f"{node.name} is not running")
    init = (
        Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    )  # the one child of `unshare --fork`
    return run("nsenter", f"--target={init}", "--mount", "--net", "--pid", *words).stdout


def freeze_kubelet(settings: Settings, node: NodeSettings) -> None:
    """The node says nothing any more, while its containers go on: what the control plane sees of a lost network."""
    inside(settings, node, "pkill", "-STOP", "-x", "kubelet")  # of this node's pid namespace


def thaw_kubelet(settings: Settings, node: NodeSettings) -> None:
    inside(settings, node, "pkill", "-CONT", "-x", "kubelet")


def node_logs(settings: Settings, node: NodeSettings) -> Path:
    return settings.logs / node.name


def volume_table(settings: Settings) -> Path:
    """Lines `folder<TAB>mount point`: what every node binds read-only when it boots."""
    return settings.state / "volumes.tsv"


def _write_files(settings: Settings, node: NodeSettings) -> None:
    for stale in ("containerd", "netns", "cni-state"):
        remove_tree(node.run / stale)
    for folder in ("containerd", "netns", "cni-state", "cni-config"):
        (node.run / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("containerd", *OWN_FOLDERS):
        (node.data / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("pods", "containers"):
        (node_logs(settings, node) / folder).mkdir(parents=True, exist_ok=True)
    volume_table(settings).touch()
    (node.run / "containerd.toml").write_text(containerd_config(single_binary_tag("pause")))
    (node.run / "kubelet.json").write_text(json.dumps(kubelet_config(settings, node), indent=2))
    (node.run / "cni-config" / "10-argosy.conflist").write_text(json.dumps(cni_config(node), indent=2))
    (node.run / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # pods resolve cluster names only


def _make_mount_points(settings: Settings) -> None:
    created = [path for path in MOUNT_POINTS if not Path(path).exists()]
    for path in created:
        Path(path).mkdir(parents=True)
    if created:
        with open(settings.state / "created-folders", "a") as file:
            file.writelines(f"{path}\n" for path in created)


def containerd_config(pause_image: str) -> str:
    return f"""\
version = 2
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause_image}"
restrict_oom_score_adj = true  # we may lack CAP_SYS_RESOURCE, which lowering it needs
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def kubelet_config(settings: Settings, node: NodeSettings) -> dict[str, Any]:
    pki = settings.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": ["pods"],
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / f"{node.name}-serving.crt"),
        "tlsPrivateKeyFile": str(pki / f"{node.name}-serving.key"),
        "address": "0.0.0.0",  # the API server fetches logs from here
        "healthzPort": 0,
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(node.run / "resolv.conf"),
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        **({"nodeLeaseDurationSeconds": 8} if settings.kills_nodes else {}),
        "syncFrequency": "5s",
    }


def cni_config(node: NodeSettings) -> dict[str, Any]:
    return {
        "cniVersion": "0.4.0",
        "name": "argosy-e2e",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": node.pod_subnet}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }

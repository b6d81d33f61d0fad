"""Names, addresses and folders of the cluster: the only place that decides them.

Three folders, all outside the source tree:

- cache: what is expensive and may be reused: binaries, the base image, buildah's store.
- nodes (inside the cache): each node's image store and kubelet folder; /run may be a small tmpfs.
- state: what belongs to one run: pid records, certificates, etcd, sockets, logs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cluster.shell import ClusterError

HOST_ADDRESS = "10.200.0.1"
"""The host's end of the bridge; the API server listens here, and nodes route through it."""
NODE_SUBNET = "10.200.0.0/24"
POD_SUBNET = "10.244.0.0/16"
SERVICE_SUBNET = "10.96.0.0/16"
KUBERNETES_SERVICE_ADDRESS = "10.96.0.1"
DNS_SERVICE_ADDRESS = "10.96.0.10"
BRIDGE = "argosy-e2e0"
API_PORT = 6443
ETCD_CLIENT_PORT = 22379
ETCD_PEER_PORT = 22380

MAX_SOCKET_PATH = 107
"""sun_path of unix(7) holds 108 bytes with its terminator."""


@dataclass(frozen=True)
class NodeSettings:
    """Addresses and folders of one node. `index` counts from 1 and determines the addresses."""

    name: str
    index: int
    data: Path
    """On disk, kept between runs as far as images go."""
    run: Path
    """Sockets and configuration of this run."""

    @property
    def address(self) -> str:
        return f"10.200.0.{10 + self.index}"

    @property
    def pod_subnet(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def netns(self) -> str:
        return f"argosy-e2e-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of the node's cable."""
        return f"argosy-e2e{self.index}"

    @property
    def cgroup(self) -> str:
        return f"argosy-e2e-{self.name}"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd" / "containerd.sock"


@dataclass(frozen=True)
class Settings:
    """Everything that may differ between two runs; `from_env` reads the user's wishes."""

    cache: Path
    state: Path
    node_count: int = 1
    """One is enough for every test of the data path; two for drain and node death."""
    external_kubeconfig: Path | None = None
    """Set: use that cluster, start and stop nothing."""
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    host_address: str = HOST_ADDRESS
    """Where the API server listens."""
    api_port: int = API_PORT
    etcd_client_port: int = ETCD_CLIENT_PORT
    etcd_peer_port: int = ETCD_PEER_PORT
    more_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Flags that a control plane gets besides, by the name of its process."""

    @classmethod
    def from_env(cls, environment: dict[str, str] | None = None) -> Settings:
        """Raises ClusterError on a value it can not use."""
        env = dict(os.environ) if environment is None else environment
        cache = Path(env.get("ARGOSY_E2E_CACHE") or Path.home() / ".cache" / "argosy-e2e").absolute()
        state = Path(env.get("ARGOSY_E2E_STATE") or "/run/argosy-e2e").absolute()
        nodes = env.get("ARGOSY_E2E_NODES") or "1"
        if nodes not in ("1", "2"):
            raise ClusterError(f"ARGOSY_E2E_NODES is {nodes!r}, expected 1 or 2")
        external = None
        if env.get("ARGOSY_E2E_EXTERNAL") == "1":
            if not env.get("KUBECONFIG"):
                raise ClusterError(
                    "ARGOSY_E2E_EXTERNAL=1 needs KUBECONFIG: the path of that cluster's kubeconfig"
                )
            external = Path(env["KUBECONFIG"]).absolute()
            if not external.is_file():
                raise ClusterError(f"KUBECONFIG={external} is not a file")
        settings = cls(cache, state, int(nodes), external, env)
        socket = settings.nodes[0].containerd_socket
        if len(str(socket)) > MAX_SOCKET_PATH:
            raise ClusterError(f"ARGOSY_E2E_STATE is too long: a socket at {socket} can not be bound")
        return settings

    @cached_property
    def nodes(self) -> tuple[NodeSettings, ...]:
        return tuple(self.node(index) for index in range(1, self.node_count + 1))

    @cached_property
    def possible_nodes(self) -> tuple[NodeSettings, ...]:
        """The nodes that any earlier run may have left behind, whatever its node count was."""
        return tuple(self.node(index) for index in (1, 2))

    def node(self, index: int) -> NodeSettings:
        name = f"node-{'ab'[index - 1]}"
        return NodeSettings(name, index, self.cache / "nodes" / name, self.state / "nodes" / name)

    @property
    def kills_nodes(self) -> bool:
        """With two nodes a dead one is noticed in seconds, which tests of node death want. A single node keeps
        Kubernetes' own patience: on a busy machine a late heartbeat must not evict its pods."""
        return self.node_count > 1

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def pids(self) -> Path:
        return self.state / "pids"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.external_kubeconfig or self.state / "kubeconfig"

"""etcd, API server, controller manager and scheduler: processes on the host, listening on the bridge.

With two nodes, timings are a test's: a dead node is noticed after 8 s instead of 40, evictions follow after 5
instead of 300.
"""

from __future__ import annotations

import time
from pathlib import Path

from cluster import daemons
from cluster.kubectl import Kubectl
from cluster.pki import FRONT_PROXY
from cluster.settings import SERVICE_SUBNET, Settings
from cluster.shell import ClusterError, poll, say

NAMES = ("scheduler", "controller-manager", "apiserver", "etcd")
"""In the order of their end."""

FAST_DETECTION = ("--node-monitor-grace-period=8s", "--node-monitor-period=1s")
FAST_EVICTION = ("--default-not-ready-toleration-seconds=5", "--default-unreachable-toleration-seconds=5")


def start(settings: Settings, binaries: Path, kubectl: Kubectl) -> None:
    """Start all four and wait until the API server is ready."""
    began = time.monotonic()
    start_one(settings, binaries, "etcd")
    start_one(settings, binaries, "apiserver")
    wait_ready(settings, kubectl)
    start_one(settings, binaries, "controller-manager")
    start_one(settings, binaries, "scheduler")
    say(f"API server ready after {time.monotonic() - began:.1f} s")


def start_one(settings: Settings, binaries: Path, name: str) -> None:
    """Start one of the four."""
    commands = {
        "etcd": _etcd,
        "apiserver": _apiserver,
        "controller-manager": _controller_manager,
        "scheduler": _scheduler,
    }
    command = commands[name](settings, binaries)
    daemons.start(settings, name, [*command, *settings.more_flags.get(name, ())])


def stop(settings: Settings) -> None:
    for name in NAMES:
        daemons.kill(settings, name)


def wait_ready(settings: Settings, kubectl: Kubectl, timeout: float = 300) -> None:
    def probe() -> bool:
        for name in ("etcd", "apiserver"):
            if daemons.alive(settings, name) is None:
                raise _Died(f"{name} ended; the end of its log:\n{daemons.log_tail(settings, name)}")
        return kubectl("get", "--raw=/readyz", timeout=30).stdout == "ok"

    try:
        poll("the API server's readiness", probe, timeout)
    except _Died as died:
        raise ClusterError(str(died)) from None


class _Died(Exception):
    """Not a ClusterError: no use in polling on."""


def _etcd(settings: Settings, binaries: Path) -> list[str | Path]:
    client = f"http://127.0.0.1:{settings.etcd_client_port}"
    peer = f"http://127.0.0.1:{settings.etcd_peer_port}"
    return [
        binaries / "etcd",
        f"--data-dir={settings.state / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def _apiserver(settings: Settings, binaries: Path) -> list[str | Path]:
    pki = settings.pki
    return [
        binaries / "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{settings.etcd_client_port}",
        f"--secure-port={settings.api_port}",
        f"--bind-address={settings.host_address}",
        f"--advertise-address={settings.host_address}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        f"--service-cluster-ip-range={SERVICE_SUBNET}",
        "--allow-privileged=true",
        *_aggregation(pki),
        *(FAST_EVICTION if settings.kills_nodes else ()),
    ]


def _aggregation(pki: Path) -> tuple[str, ...]:
    """How the API server presents itself and a request's user to aggregated APIs. It asks their endpoints, because no
    kube-proxy runs on the host."""
    return (
        f"--proxy-client-cert-file={pki / f'{FRONT_PROXY}.crt'}",
        f"--proxy-client-key-file={pki / f'{FRONT_PROXY}.key'}",
        f"--requestheader-client-ca-file={pki / 'front-proxy-ca.crt'}",
        f"--requestheader-allowed-names={FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--enable-aggregator-routing=true",
    )


def _controller_manager(settings: Settings, binaries: Path) -> list[str | Path]:
    pki = settings.pki
    return [
        binaries / "kube-controller-manager",
        f"--kubeconfig={pki / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={pki / 'sa.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--secure-port=0",
        "--horizontal-pod-autoscaler-sync-period=2s",
        *(FAST_DETECTION if settings.kills_nodes else ()),
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
    ]


def _scheduler(settings: Settings, binaries: Path) -> list[str | Path]:
    return [
        binaries / "kube-scheduler",
        f"--kubeconfig={settings.pki / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
    ]

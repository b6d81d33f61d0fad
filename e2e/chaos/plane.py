"""The control plane of a run: on loopback addresses and free ports, beside whatever else this machine runs.

Owns its folder, processes and administrator's client. Needs no root. Invariant: `close` kills every process that it
started, and removes its data unless the run is to be examined.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

from chaos.api import Api
from cluster import control_plane, daemons, go_binaries, pki
from cluster.kubectl import Kubectl
from cluster.settings import Settings
from processes import free_port

LOOPBACK = "127.0.0.1"
OPERATOR_USER = "system:serviceaccount:argosy-system:argosy-operator"
FAST_NODES = ("--node-monitor-grace-period=16s", "--node-monitor-period=1s")
"""A node that says nothing is noticed after 16 s instead of 40. Simulated nodes on a busy machine may be late by
seconds, and must not be taken for dead."""
FAST_EVICTION = ("--default-not-ready-toleration-seconds=3", "--default-unreachable-toleration-seconds=3")
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Metadata",
            "users": [OPERATOR_USER],
            "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        },
        {"level": "None"},
    ],
}
"""What the API server notes: every write of the operator, and nothing else."""


class Plane:
    """etcd, API server, controller manager and scheduler. `start` comes first."""

    def __init__(self, folder: Path, *, notices_dead_nodes: bool) -> None:
        environment = Settings.from_env({k: v for k, v in os.environ.items() if k != "ARGOSY_E2E_EXTERNAL"})
        api, client, peer = free_port(), free_port(), free_port()
        self.audit_log = folder / "audit.log"
        policy = folder / "audit-policy.json"
        folder.mkdir(parents=True, exist_ok=True)
        policy.write_text(json.dumps(AUDIT_POLICY))
        self.settings = Settings(
            environment.cache,
            folder,
            node_count=0,
            host_address=LOOPBACK,
            api_port=api,
            etcd_client_port=client,
            etcd_peer_port=peer,
            more_flags={
                "apiserver": (
                    f"--audit-policy-file={policy}",
                    f"--audit-log-path={self.audit_log}",
                    "--endpoint-reconciler-type=none",
                    *(FAST_EVICTION if notices_dead_nodes else ()),
                ),
                # As many writes a second as a large fleet that is created at once needs.
                "controller-manager": (
                    "--kube-api-qps=300",
                    "--kube-api-burst=600",
                    *(FAST_NODES if notices_dead_nodes else ()),
                ),
            },
        )
        self._binaries = go_binaries.binaries(self.settings)

    @property
    def url(self) -> str:
        return f"https://{LOOPBACK}:{self.settings.api_port}"

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self._binaries / "kubectl", self.settings.kubeconfig)

    @property
    def helm(self) -> Path:
        return self._binaries / "helm"

    async def start(self) -> None:
        """Build what is missing, and start everything.

        Raises:
            ClusterError: a binary could not be built, or a process ended.
        """
        await asyncio.to_thread(go_binaries.ensure_binaries, self.settings)
        await asyncio.to_thread(pki.create, self.settings)
        await asyncio.to_thread(control_plane.start, self.settings, self._binaries, self.kubectl)

    async def restart_api_server(self) -> None:
        """Start the API server anew, on the same data, and wait until it is ready."""
        control_plane.start_one(self.settings, self._binaries, "apiserver")
        await asyncio.to_thread(control_plane.wait_ready, self.settings, self.kubectl)

    async def kill_api_server(self) -> None:
        await asyncio.to_thread(daemons.kill, self.settings, "apiserver")

    def connect(self) -> Api:
        """The administrator's client."""
        context = self.tls()
        context.load_cert_chain(self.settings.pki / "admin.crt", self.settings.pki / "admin.key")
        return Api(self.url, context)

    def tls(self) -> ssl.SSLContext:
        """Trusts the API server's certificate."""
        return ssl.create_default_context(cafile=str(self.settings.pki / "ca.crt"))

    def operator_writes(self) -> list[dict[str, str]]:
        """Every write of the operator that the API server has answered, dry runs left out, oldest first: `verb`,
        `resource` (with its subresource), `namespace`, `name`, `status`."""
        found = []
        if not self.audit_log.exists():
            return []
        with open(self.audit_log, encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break
                event = json.loads(line)
                target = event.get("objectRef", {})
                if "dryRun=" in event["requestURI"]:
                    continue
                resource = "/".join(
                    part for part in (target.get("resource", ""), target.get("subresource", "")) if part
                )
                found.append(
                    {
                        "verb": event["verb"],
                        "resource": resource,
                        "namespace": target.get("namespace", ""),
                        "name": target.get("name", ""),
                        "status": str(event.get("responseStatus", {}).get("code", "")),
                    }
                )
        return found

    def close(self, *, keep: bool) -> None:
        """End every process; remove the data too, unless `keep`."""
        control_plane.stop(self.settings)
        if not keep:
            shutil.rmtree(self.settings.state, ignore_errors=True)


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Make SIGTERM and SIGHUP a KeyboardInterrupt, so that what was started is ended."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Collect the evidence of a failed run in one folder: state, events, logs of pods and daemons."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster import daemons
from cluster.kubectl import Kubectl
from cluster.settings import Settings
from cluster.shell import ClusterError, say

CLUSTER_READS = {
    "everything.txt": (
        "get",
        "all,ingress,pvc,configmap,networkpolicy,pdb,endpointslice",
        "-A",
        "-o",
        "wide",
    ),
    "events.txt": ("get", "events", "-A", "--sort-by=.metadata.creationTimestamp"),
    "nodes.txt": ("describe", "nodes"),
    "pods.txt": ("describe", "pods", "-A"),
    "pods.yaml": ("get", "pods", "-A", "-o", "yaml"),
    "workloads.txt": ("describe", "deployments,statefulsets,daemonsets,replicasets,jobs", "-A"),
    "services.txt": ("describe", "services", "-A"),
    "volumes.txt": ("describe", "pv,pvc", "-A"),
    "inferenceservices.yaml": ("get", "inferenceservices", "-A", "-o", "yaml"),
    "inferenceservices.txt": ("describe", "inferenceservices", "-A"),
    "configmaps.yaml": ("get", "configmaps", "-A", "-o", "yaml"),
    "crds.txt": ("get", "crds"),
}
"""File -> kubectl's words. No Secret is ever read."""

LOG_LIMIT = "--limit-bytes=5000000"


def collect(settings: Settings, kubectl: Kubectl, target: Path) -> Path:
    """Fill `target` (emptied first) and return it; never raises for a part that is not available."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for name, words in CLUSTER_READS.items():
        _write(kubectl, target / name, *words)
    _pod_logs(kubectl, target / "pod-logs")
    if settings.logs.is_dir():
        shutil.copytree(
            settings.logs, target / "daemons", ignore=shutil.ignore_patterns("pods", "containers")
        )
        lines = [
            f"{name}: {'running' if daemons.alive(settings, name) else 'gone'}"
            for name in daemons.names(settings)
        ]
        (target / "daemons.txt").write_text("\n".join([*lines, ""]))
    say(f"collected logs, events and descriptions in {target}")
    return target


def _pod_logs(kubectl: Kubectl, target: Path) -> None:
    target.mkdir()
    try:
        pods = kubectl.get("pods", "-A")["items"]
    except ClusterError:
        return
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status", {})
        statuses = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        for container in statuses:
            words = (
                "logs",
                "-n",
                metadata["namespace"],
                metadata["name"],
                "-c",
                container["name"],
                LOG_LIMIT,
            )
            name = f"{metadata['namespace']}_{metadata['name']}_{container['name']}"
            _write(kubectl, target / f"{name}.log", *words)
            if container.get("restartCount"):
                _write(kubectl, target / f"{name}.previous.log", *words, "--previous")


def _write(kubectl: Kubectl, path: Path, *words: str) -> None:
    try:
        done = kubectl(*words, check=False, timeout=60)
        path.write_text(done.stdout + done.stderr)
    except ClusterError as error:
        path.write_text(f"{error}\n")

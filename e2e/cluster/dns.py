"""Cluster DNS: CoreDNS as an ordinary Deployment in kube-system. Cluster names only, nothing is forwarded."""

from __future__ import annotations

import string
from pathlib import Path

from cluster.kubectl import Kubectl
from cluster.settings import DNS_SERVICE_ADDRESS

MANIFEST = Path(__file__).parent / "manifests" / "coredns.yaml"


def install(kubectl: Kubectl, image: str, timeout: float = 300) -> None:
    """Apply and wait until it answers."""
    kubectl.apply(render(image))
    kubectl(
        "rollout",
        "status",
        "deployment/coredns",
        "-n",
        "kube-system",
        f"--timeout={timeout:.0f}s",
        timeout=timeout + 10,
    )


def render(image: str) -> str:
    return string.Template(MANIFEST.read_text()).substitute(image=image, address=DNS_SERVICE_ADDRESS)

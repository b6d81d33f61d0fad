"""GPUs that are only numbers: a node advertises `nvidia.com/gpu` without owning one.

The scheduler counts them as it counts real ones; nothing is injected into a pod. The count survives
heartbeats and restarts of the kubelet, not the deletion of the Node object.
"""

from __future__ import annotations

import json
from typing import Any

from cluster.kubectl import Kubectl

RESOURCE = "nvidia.com/gpu"


def advertise(kubectl: Kubectl, node: str, count: int, timeout: float = 120) -> None:
    """Set the node's GPU count and wait until its kubelet has made it allocatable (a heartbeat or two)."""
    path = f"/status/capacity/{RESOURCE.replace('/', '~1')}"
    patch = json.dumps([{"op": "add", "path": path, "value": str(count)}])
    kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={patch}")

    def allocatable(found: dict[str, Any]) -> bool:
        return found["status"]["allocatable"].get(RESOURCE) == str(count)

    kubectl.poll(f"{count} {RESOURCE} allocatable on {node}", ("node", node), allocatable, timeout)

"""A base URL for a Service: its cluster address where the host routes there, a port-forward otherwise."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.kubectl import Kubectl
from cluster.shell import ClusterError


@contextmanager
def service(kubectl: Kubectl, namespace: str, name: str, port: int, *, routed: bool) -> Iterator[str]:
    """`http://ADDRESS:PORT` without a slash at its end, good inside the `with`.

    `routed`: this machine reaches cluster addresses, with every pod behind the Service. A port-forward
    reaches one pod only and ends with it.
    """
    if routed:
        yield f"http://{_cluster_address(kubectl.get('service', name, '-n', namespace))}:{port}"
        return
    argv = kubectl.argv("port-forward", "-n", namespace, f"service/{name}", f":{port}")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()  # Forwarding from 127.0.0.1:40123 -> 8080
            match = re.search(r"127\.0\.0\.1:(\d+)", line)
            if match is None:
                raise ClusterError(f"no port-forward to service {namespace}/{name}: {line.strip()}")
            yield f"http://127.0.0.1:{match[1]}"
        finally:
            process.kill()


def _cluster_address(found: dict[str, Any]) -> str:
    address = found["spec"]["clusterIP"]
    if address == "None":
        raise ClusterError(f"service {found['metadata']['name']} is headless: it has no address of its own")
    return address

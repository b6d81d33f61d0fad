"""A Ray cluster of several nodes on this machine, in a process of its own.

It listens on 127.0.0.1 only. It ends, with all that it has started, when its standard input closes. A line `add` starts
another node, a line `kill` kills the newest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from argosy_engine.executor.private_ray import LOOPBACK, LOOPBACK_ONLY, SYSTEM_CONFIG, start_no_api_server
from processes import descendants

START_ATTEMPTS = 10
"""A node ends itself if one of its own processes does not start within 15 s, which a busy machine may need."""
QUICK_NOTICE = {
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 10,
}
"""A killed node is noticed within some seconds; one that is slow has time."""


class VirtualNodes:
    """A running cluster, whose nodes have one CPU each."""

    def __init__(self, count: int, directory: str) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**token, **LOOPBACK_ONLY}
        """For processes that join it."""
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environment, "RAY_TMPDIR": directory},
        )
        self.address = ""
        self._num_nodes = 0
        self.fill(count)

    def fill(self, count: int) -> None:
        """Start nodes until there are so many, and wait until they can be used."""
        while self._num_nodes < count:
            self._order(b"add\n")
            self._num_nodes += 1

    def kill(self) -> None:
        """Kill a node's processes but for those of workers, which notice it, with SIGKILL."""
        self._order(b"kill\n")
        self._num_nodes -= 1

    def _order(self, what: bytes) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what)
        self._process.stdin.flush()
        self.address = self._process.stdout.readline().decode().strip()
        assert self.address, "the cluster has ended"

    def stop(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def virtual_nodes(count: int) -> Iterator[VirtualNodes]:
    """Run a cluster, which RAY_ADDRESS names, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory, pytest.MonkeyPatch.context() as patch:
        nodes = VirtualNodes(count, directory)
        try:
            for name, value in nodes.environment.items():
                patch.setenv(name, value)
            patch.setenv("RAY_ADDRESS", nodes.address)
            from ray._private import ray_constants

            patch.setattr(
                ray_constants, "ENABLE_RAY_CLUSTER", False
            )  # so that 127.0.0.1 is an address of a cluster
            yield nodes
        finally:
            nodes.stop()


def main() -> None:
    from ray._private import services
    from ray.cluster_utils import Cluster

    services.start_api_server = start_no_api_server
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # for what Ray prints
    cluster = Cluster(shutdown_at_exit=True)
    try:
        nodes = []
        for line in iter(sys.stdin.readline, ""):
            if line.strip() == "add":
                nodes.append(add_node(cluster))
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            os.write(answers, f"{cluster.address}\n".encode())
    finally:
        kill(descendants(os.getpid()))
    os._exit(0)


def add_node(cluster: Any) -> Any:
    head = {"include_dashboard": False, "no_monitor": True, "_system_config": SYSTEM_CONFIG | QUICK_NOTICE}
    arguments = {"num_cpus": 1, "node_ip_address": LOOPBACK, **({} if cluster.head_node else head)}
    for attempt in range(START_ATTEMPTS):
        running = set(descendants(os.getpid()))
        try:
            return cluster.add_node(**arguments)
        except Exception:
            kill(list(set(descendants(os.getpid())) - running))
            if attempt == START_ATTEMPTS - 1:
                raise
    raise AssertionError


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()

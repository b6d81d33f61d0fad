"""The control group under which a node's kubelet keeps its pods, on cgroup v1 and on v2.

A node's kubelet gets a root of its own (`cgroupRoot`), so that kubelets do not interfere, and removing a node only
deletes one subtree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cluster.settings import NodeSettings, Settings
from cluster.shell import ClusterError, poll

ROOT = Path("/sys/fs/cgroup")
V2_CONTROLLERS = "+cpuset +cpu +io +memory +pids"


def unified() -> bool:
    """Whether this machine has only cgroup v2."""
    return (ROOT / "cgroup.controllers").exists()


def create(node: NodeSettings) -> None:
    try:
        if unified():
            for controller in V2_CONTROLLERS.split():
                (ROOT / "cgroup.subtree_control").write_text(controller)
            (ROOT / node.cgroup).mkdir()
            return
        for hierarchy in _hierarchies():
            (hierarchy / node.cgroup).mkdir()
        cpuset = ROOT / "cpuset"
        for name in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # empty in a new group, and no process may enter until set
            (cpuset / node.cgroup / name).write_text((cpuset / name).read_text())
    except OSError as error:
        raise ClusterError(f"control groups can not be created here: {error}") from error


def destroy(settings: Settings) -> None:
    """Remove the nodes' groups; their processes must be dead or dying."""
    for node in settings.possible_nodes:
        remove_node(node)


def remove_node(node: NodeSettings) -> None:
    """Also due before a killed node is started again: its kubelet waits 3 s for every stale container."""
    for top in _paths(node):
        poll(f"the end of every process in {top}", partial(_remove, top), timeout=60, interval=0.02)


def remains(settings: Settings) -> list[str]:
    return [str(path) for node in settings.possible_nodes for path in _paths(node)]


def _hierarchies() -> Iterator[Path]:
    for path in sorted(ROOT.iterdir()):
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists():
            yield path


def _paths(node: NodeSettings) -> list[Path]:
    parents = [ROOT] if unified() else list(_hierarchies())
    return [parent / node.cgroup for parent in parents if (parent / node.cgroup).is_dir()]


def _remove(top: Path) -> bool:
    try:
        for folder, _, _ in os.walk(top, topdown=False):
            os.rmdir(folder)
    except OSError:
        return False
    return True

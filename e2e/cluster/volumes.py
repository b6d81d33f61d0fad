"""Volumes for pods: a folder of this machine, read-only, for what is too large for an image; and disks of a node.

PyPI's torch is 5 GB with its CUDA libraries. `site_packages` makes a folder of torch and what it needs, by
hard links to an environment that has them (no copy, no download) when its Python is the base image's, else by
pip, once. `expose` shows a folder to pods: bound read-only into every node, then a `local` PersistentVolume
and a bound claim. `make_disk` makes such a volume of an empty folder, or of a disk that is soon full.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import base_image, daemons, node
from cluster.kubectl import Kubectl
from cluster.settings import Settings
from cluster.shell import ClusterError, remove_tree, run, say

STORAGE_CLASS = "argosy-e2e-local"
"""No provisioner has this name: claims bind only to the volumes made here."""
CLOSURE_SCRIPT = Path(__file__).with_name("distribution_files.py")


def site_packages(
    settings: Settings, packages: Sequence[str] = ("torch",), python: str | Path = sys.executable
) -> Path:
    """A folder for PYTHONPATH that holds `packages` and their requirements, for the base image's Python.

    Taken from `python`'s environment when that has the packages and the same minor version.
    """
    done = run(python, "-I", CLOSURE_SCRIPT, *packages, check=False)
    if done.returncode == 0:
        found = json.loads(done.stdout)
        if tuple(found["version"]) == base_image.PYTHON:
            return _linked(settings, found)
    return _downloaded(settings, packages, python)


def expose(
    settings: Settings, kubectl: Kubectl, namespace: str, name: str, folder: Path, size: str = "10Gi"
) -> str:
    """Make `folder` mountable, read-only, by pods of `namespace`; returns the claim's name, which is `name`.

    In a pod: `persistentVolumeClaim: {claimName: NAME, readOnly: true}`. Files must be readable by everyone.
    """
    if settings.external_kubeconfig:
        raise ClusterError("folders of this machine can not be shown to the pods of an external cluster")
    if not folder.is_dir():
        raise ClusterError(f"no such folder: {folder}")
    mount_point = settings.state / "volumes" / f"{namespace}-{name}"
    if not mount_point.exists():
        mount_point.mkdir(parents=True)
        for each in settings.nodes:
            if daemons.alive(settings, each.name):
                node.inside(settings, each, "mount", "--bind", folder, mount_point)
                node.inside(settings, each, "mount", "-o", "remount,bind,ro", mount_point)
        with open(node.volume_table(settings), "a") as table:  # mounted again when a node boots again
            table.write(f"{folder}\t{mount_point}\n")
    kubectl.apply(
        local_volume(namespace, name, mount_point, size, [each.name for each in settings.nodes]),
        claim_of(namespace, name, size),
    )
    _wait_bound(kubectl, namespace, name)
    return name


def make_disk(settings: Settings, kubectl: Kubectl, namespace: str, name: str, *, size: str = "") -> Path:
    """Make an empty disk on the first node, to which pods of `namespace` write through the claim `name`; returns its
    folder. With a `size` (`8m`) it holds no more, and only the node sees what is in the folder.
    """
    if settings.external_kubeconfig:
        raise ClusterError("the nodes of an external cluster get no disks from here")
    chosen = settings.nodes[0]
    folder = chosen.data / "disks" / f"{namespace}-{name}"
    folder.mkdir()
    if size:
        node.inside(settings, chosen, "mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder)
    kubectl.apply(
        local_volume(namespace, name, folder, "1Gi", [chosen.name], "ReadWriteOnce"),
        claim_of(namespace, name, "1Gi", "ReadWriteOnce"),
    )
    _wait_bound(kubectl, namespace, name)
    return folder


def withdraw(kubectl: Kubectl, namespace: str, name: str) -> None:
    """Delete the claim and its volume (the folder stays); no pod may use it any more."""
    kubectl("delete", "pvc", name, "-n", namespace, "--ignore-not-found")
    kubectl("delete", "pv", f"{namespace}-{name}", "--ignore-not-found")


def _wait_bound(kubectl: Kubectl, namespace: str, name: str) -> None:
    bound = "jsonpath={.status.phase}=Bound"
    kubectl.wait(f"persistentvolumeclaim/{name}", bound, "-n", namespace, timeout=120)


def local_volume(
    namespace: str, name: str, path: Path, size: str, nodes: list[str], access: str = "ReadOnlyMany"
) -> dict[str, Any]:
    hostnames = {"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}"},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": [access],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {"namespace": namespace, "name": name},
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostnames]}]}},
        },
    }


def claim_of(namespace: str, name: str, size: str, access: str = "ReadOnlyMany") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": [access],
            "storageClassName": STORAGE_CLASS,
            "volumeName": f"{namespace}-{name}",
            "resources": {"requests": {"storage": size}},
        },
    }


def _linked(settings: Settings, found: dict[str, Any]) -> Path:
    """Hard links share the files with the environment; pip replaces files, it never writes into them."""
    distributions: dict[str, list[str]] = found["distributions"]
    root = Path(found["root"])
    digest = hashlib.sha256(json.dumps([str(root), sorted(distributions)]).encode()).hexdigest()[:12]
    target = settings.cache / f"site-{digest}"
    if target.exists():
        return target
    started = time.monotonic()
    settings.cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="site-", dir=settings.cache))
    work.chmod(0o755)
    try:
        for files in distributions.values():
            for name in files:
                source, link = root / name, work / name
                if source.is_file() and not link.exists():
                    link.parent.mkdir(parents=True, exist_ok=True)
                    _link(source, link)
        work.rename(target)
    except BaseException:
        remove_tree(work)
        raise
    say(f"linked {len(distributions)} distributions into {target} in {time.monotonic() - started:.1f} s")
    return target


def _link(source: Path, link: Path) -> None:
    try:
        os.link(source, link)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, link)


def _downloaded(settings: Settings, packages: Sequence[str], python: str | Path) -> Path:
    version = ".".join(map(str, base_image.PYTHON))
    digest = hashlib.sha256(json.dumps([version, sorted(packages)]).encode()).hexdigest()[:12]
    target = settings.cache / f"site-{digest}"
    if target.exists():
        return target
    say(f"installing {' '.join(packages)} for Python {version} (once; several GB)")
    settings.cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="site-", dir=settings.cache))
    work.chmod(0o755)
    try:
        run(
            *(python, "-m", "pip", "install", "--quiet", "--target", work, "--python-version", version),
            *("--implementation", "cp", "--only-binary=:all:", *packages),
            timeout=3600,
        )
        work.rename(target)
    except BaseException:
        remove_tree(work)
        raise
    return target

"""The cluster and the installed product, once for the whole run; evidence is collected when a test fails.

The cluster is taken down at the end, whatever happened. Nothing here skips: where no cluster can be started, the run
fails and says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import lifecycle, volumes
from cluster.history import History, recording
from cluster.kubectl import RESTRICTED
from cluster.lifecycle import Cluster
from cluster.settings import Settings
from cluster.shell import stop_cleanly, uninterrupted
from image_context import ROOT, build_context

CHART = ROOT / "charts" / "argosy"
ARTIFACTS = ROOT / "e2e" / "artifacts"
SYSTEM = "argosy-system"
TENANT = "team-a"
GPUS = 4
"""Advertised by the node: one more than the replicas of the tests, so that a rollout can surge."""
ROUTER_KEY = "e2e-client-key"
TORCH_CLAIM = "torch"


@dataclass(frozen=True)
class Stack:
    """Argosy in the cluster: chart installed, router reachable at `url`."""

    cluster: Cluster
    url: str
    images: dict[str, str]


_failed: list[str] = []


def pytest_configure() -> None:
    stop_cleanly()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Collects logs, events and descriptions at the first failure, before anything is taken down."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    cluster = item.session.stash.get(_CLUSTER, None)
    if report.failed and cluster is not None and not _failed:
        _failed.append(report.nodeid)
        print(f"evidence: {cluster.collect_artifacts(ARTIFACTS)}")


_CLUSTER: pytest.StashKey[Cluster] = pytest.StashKey()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    settings = Settings.from_env(dict(os.environ))
    try:
        up = lifecycle.up(settings)
        request.session.stash[_CLUSTER] = up
        yield up
    finally:
        with uninterrupted():
            lifecycle.down(settings)


@pytest.fixture(scope="session")
def stack(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Builds the wheel and the three images, installs the chart, gives the tenant its namespace and its GPUs."""
    context = build_context()
    images = {
        name: cluster.build_image(context / f"{name}.Dockerfile", context, name, arguments)
        for name, arguments in (
            ("engine", {"INSTALL_TORCH": "0", "BUILD_KERNELS": "0", "INSTALL_GCC": "0"}),
            ("router", {"COMPILE": "0"}),
            ("operator", {}),
        )
    }
    cluster.prune_images(list(images.values()))
    cluster.advertise_gpus(GPUS)
    cluster.kubectl.namespace(TENANT, RESTRICTED)
    cluster.kubectl.namespace(SYSTEM, RESTRICTED)
    expose_torch(cluster, TENANT)
    try:
        install(cluster, images)
        with cluster.service(SYSTEM, "argosy-router", 80) as url:
            yield Stack(cluster, url, images)
        cluster.helm("uninstall", "argosy", "-n", SYSTEM, "--wait", timeout=180)
    finally:
        if not cluster.external:
            cluster.kubectl.delete_namespace(TENANT)


def recorded(cluster: Cluster, namespace: str, name: str) -> AbstractContextManager[History]:
    """Record every version of a service while the block runs."""
    path = f"apis/inference.argosy.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
    return recording(cluster.kubectl, path, f"fieldSelector=metadata.name%3D{name}")


def expose_torch(cluster: Cluster, namespace: str) -> None:
    """Give a namespace the claim from which its engines take torch, which their image lacks."""
    if not cluster.external:
        site = volumes.site_packages(cluster.settings, ("torch", "numpy", "xgrammar"))
        cluster.expose_folder(namespace, TORCH_CLAIM, site)


def install(
    cluster: Cluster,
    images: dict[str, str],
    *more: str,
    keys: tuple[str, ...] = (ROUTER_KEY,),
    chart: Path = CHART,
) -> None:
    """`helm upgrade --install`, as users do it. Without `keys` the operator makes one for clients."""
    values = []
    for name, image in images.items():
        repository, _, tag = image.rpartition(":")
        values += [
            "--set",
            f"{name}.image.repository={repository}",
            "--set-string",
            f"{name}.image.tag={tag}",
        ]
    cluster.helm(
        "upgrade", "--install", "argosy", str(chart), "-n", SYSTEM, *values,
        *(f"--set=router.apiKeys[{number}]={key}" for number, key in enumerate(keys)), *more,
        "--wait", "--timeout", "300s", timeout=330,
    )  # fmt: skip

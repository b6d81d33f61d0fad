"""The chart as Helm renders it. Helm is that of PATH, of `ARGOSY_HELM`, or the one that `make e2e` has built."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "argosy"
NAMESPACE = "argosy-system"
Object = dict[str, Any]


@functools.cache
def helm() -> str:
    """Helm's path; the test is skipped where there is none."""
    cache = Path(os.environ.get("ARGOSY_E2E_CACHE") or Path.home() / ".cache" / "argosy-e2e")
    built = sorted(cache.glob("bin-*/helm"))
    found = os.environ.get("ARGOSY_HELM") or shutil.which("helm") or (str(built[-1]) if built else "")
    if not found:
        pytest.skip("needs helm: install it, or run `make e2e` once")
    return found


def render(
    values: Mapping[str, Any] | None = None, *, release: str = "argosy", namespace: str = NAMESPACE
) -> list[Object]:
    """All objects of a release, hooks included.

    Raises:
        AssertionError: Helm refused; the message is its own.
    """
    command = [helm(), "template", release, str(CHART), "--namespace", namespace, "--values", "-"]
    done = subprocess.run(
        command, input=yaml.safe_dump(dict(values or {})), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def identity(obj: Object) -> tuple[str, str, str]:
    """Kind, namespace and name."""
    return obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pod_specs(objects: list[Object]) -> dict[str, Object]:
    """Specs of the pods that a release starts, by the name of their owner."""
    owners = [each for each in objects if each["kind"] in ("Deployment", "DaemonSet")]
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in owners}
    return pods | {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Pod"}

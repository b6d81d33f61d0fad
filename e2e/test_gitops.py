"""What a GitOps tool does to a running service: upgrade the chart and go back, apply again, find drift put right.

In each case no pod of an engine is touched: the same object, not restarted, not even written to.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.shell import poll
from conftest import CHART, ROOT, SYSTEM, TENANT, Stack, install
from image_context import label_arguments
from test_chart_rights import named
from test_whole_path import is_ready

NAME = "synced"
WORDS = (f"inferenceservice/{NAME}", "-n", TENANT)
SELECTOR = f"inference.argosy.dev/service={NAME}"
ROUTERS = "app.kubernetes.io/component=router"
CHILDREN = "deployments,services,secrets,configmaps,poddisruptionbudgets"
DEFINITION = "inferenceservices.inference.argosy.dev"
NEXT = "9.0.0"


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[Stack]:
    """A service that names no image, so that it has the operator's default."""
    kubectl = stack.cluster.kubectl
    kubectl.apply(named(NAME))
    kubectl.poll("the service to be Ready", WORDS, is_ready, 420)
    yield stack
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")
    poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)


def pods(stack: Stack) -> list[tuple[Any, ...]]:
    """What a touch of a pod would change: the pods of the service's engines, and of routers."""
    kubectl = stack.cluster.kubectl
    found = [*kubectl.pods(TENANT, SELECTOR), *kubectl.pods(SYSTEM, ROUTERS)]
    return sorted(
        (
            pod["metadata"]["name"],
            pod["metadata"]["uid"],
            pod["metadata"].get("generation"),
            pod["metadata"].get("labels"),
            pod["metadata"].get("annotations"),
            pod["metadata"].get("deletionTimestamp"),
            [(each["restartCount"], each["imageID"]) for each in pod["status"]["containerStatuses"]],
        )
        for pod in found
    )


def children(stack: Stack) -> dict[str, dict[str, Any]]:
    items = stack.cluster.kubectl.get(CHILDREN, "-n", TENANT, "-l", SELECTOR)["items"]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in items}


def versions(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: each["metadata"]["resourceVersion"] for name, each in found.items()}


def template(stack: Stack) -> Any:
    return children(stack)[f"Deployment/{NAME}-engine"]["spec"]["template"]


@pytest.fixture
def next_chart(tmp_path: Path) -> Path:
    """The chart of a later release, whose definition has one more field."""
    copy = Path(shutil.copytree(CHART, tmp_path / "argosy"))
    text = (copy / "Chart.yaml").read_text()
    text, count = re.subn(r"(?m)^(version|appVersion): .*$", rf'\1: "{NEXT}"', text)
    assert count == 2
    (copy / "Chart.yaml").write_text(text)
    definition = copy / "templates" / "crd-inferenceservices.yaml"
    text = definition.read_text()
    head, spec, tail = text.partition("\n          spec:\n")
    start = "\n            properties:\n"
    assert spec
    assert start in tail
    tail = tail.replace(start, f"{start}              laterField: {{type: string, maxLength: 8}}\n", 1)
    definition.write_text(head + spec + tail)
    return copy


def test_an_upgrade_and_the_way_back_touch_no_pod(service: Stack, next_chart: Path) -> None:
    cluster, kubectl = service.cluster, service.cluster.kubectl
    operator = cluster.build_image(
        ROOT / "dist" / "images" / "operator.Dockerfile", ROOT / "dist" / "images", "operator-next",
        {**label_arguments(), "VERSION": NEXT},
    )  # fmt: skip
    assert operator != service.images["operator"]
    # An image that cannot be pulled: a pod that were replaced would not come up again.
    later = {**service.images, "operator": operator, "engine": f"localhost/later-engine:{NEXT}"}
    before, running, generation = (
        pods(service),
        template(service),
        kubectl.get(*WORDS)["metadata"]["generation"],
    )
    assert len(before) > 1

    for images, chart, available in ((later, next_chart, later["engine"]), (service.images, CHART, "")):
        install(cluster, images, chart=chart)
        operators = kubectl.pods(SYSTEM, "app.kubernetes.io/component=operator")
        living = [pod for pod in operators if not pod["metadata"].get("deletionTimestamp")]
        assert [pod["spec"]["containers"][0]["image"] for pod in living] == [images["operator"]]
        kubectl.poll(
            "the operator to have seen the service",
            WORDS,
            lambda found, wanted=available: found["status"].get("availableImage", "") == wanted,  # type: ignore[misc]
            120,
        )
        definition = kubectl.get("customresourcedefinition", DEFINITION)
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert ("laterField" in schema["properties"]["spec"]["properties"]) == (chart == next_chart)
        assert definition["status"]["storedVersions"] == ["v1alpha1"]
        found = kubectl.get(*WORDS)
        assert is_ready(found)
        assert found["metadata"]["generation"] == generation
        assert found["status"]["image"] == service.images["engine"]
        assert template(service) == running
        assert pods(service) == before


@pytest.mark.parametrize("server_side", [True, False], ids=["server-side", "client-side"])
def test_applying_again_changes_nothing(service: Stack, server_side: bool) -> None:
    kubectl = service.cluster.kubectl
    text = json.dumps(named(NAME))
    words = ("apply", "-f", "-", *(("--server-side", "--force-conflicts") if server_side else ()))
    kubectl(*words, stdin=text)  # client-side adds its annotation once
    resource, before, own = kubectl.get(*WORDS), pods(service), versions(children(service))
    for _ in range(3):
        kubectl(*words, stdin=text)
        assert kubectl("diff", *words[1:], stdin=text).stdout == ""
    put_drift_right(service)  # the operator has looked at the service since
    assert kubectl.get(*WORDS) == resource
    now = versions(children(service))
    assert {name for name in own if own[name] != now[name]} == {f"Service/{NAME}-engine"}
    assert pods(service) == before


def put_drift_right(stack: Stack) -> None:
    """Change a child as somebody might by hand, and wait until it is as it was."""
    kubectl = stack.cluster.kubectl
    name = f"{NAME}-engine"
    before = kubectl.get("service", name, "-n", TENANT)["spec"]["selector"]
    patch = json.dumps({"spec": {"selector": {"somebody": "else"}}})
    kubectl("patch", "service", name, "-n", TENANT, "--type=merge", "-p", patch)
    kubectl.poll(
        "the Service's selector to be put back",
        ("service", name, "-n", TENANT),
        lambda found: found["spec"]["selector"] == before,
        60,
    )


def test_drift_is_put_right_without_touching_a_pod(service: Stack) -> None:
    kubectl = service.cluster.kubectl
    before, own, resource = pods(service), children(service), kubectl.get(*WORDS)
    put_drift_right(service)
    for kind in ("Service", "PodDisruptionBudget"):
        if f"{kind}/{NAME}-engine" in own:
            kubectl("delete", kind.lower(), f"{NAME}-engine", "-n", TENANT)
    poll(
        "what was deleted to be back",
        lambda: children(service).keys() == own.keys() or None,
        60,
        interval=0.5,
    )
    restored = children(service)
    for name, child in own.items():
        wanted = {
            key: value for key, value in child.get("spec", {}).items() if not key.startswith("clusterIP")
        }
        found = {
            key: value
            for key, value in restored[name].get("spec", {}).items()
            if not key.startswith("clusterIP")
        }
        assert found == wanted, name
    assert pods(service) == before
    assert kubectl.get(*WORDS)["metadata"]["generation"] == resource["metadata"]["generation"]


def test_what_somebody_adds_to_the_pods_template_is_removed(service: Stack) -> None:
    """Server-side apply leaves what another manager has added. The API server's own defaults are no addition, nor is an
    annotation of the template: `kubectl rollout restart` writes one."""
    kubectl = service.cluster.kubectl
    deployment = (f"deployment/{NAME}-engine", "-n", TENANT)
    before = template(service)
    variables = before["spec"]["containers"][0]["env"]
    derived = next(each["name"] for each in variables if "valueFrom" in each)
    kubectl("set", "env", *deployment, "SOMEBODY=else", f"{derived}=fixed")  # applying both would be refused
    sidecar = {"name": "sidecar", "image": "localhost/nowhere:1"}
    pod = {"containers": [sidecar], "tolerations": [{"operator": "Exists"}], "hostNetwork": True}
    kubectl("patch", *deployment, "-p", json.dumps({"spec": {"template": {"spec": pod}}}))
    kubectl("rollout", "restart", *deployment)

    def is_put_right(found: dict[str, Any]) -> bool:
        return bool(found["spec"]["template"]["spec"] == before["spec"])

    restored = kubectl.poll("the pod's template to be as it was", deployment, is_put_right, 60)
    assert "kubectl.kubernetes.io/restartedAt" in restored["spec"]["template"]["metadata"]["annotations"]
    managers = kubectl.get(*deployment, "--show-managed-fields")["metadata"]["managedFields"]
    updates = [
        entry
        for entry in managers
        if entry["manager"] == "argosy-operator" and entry["operation"] == "Update"
    ]
    assert updates == [], "what is removed is not owned"
    kubectl.poll("the service to be Ready again", WORDS, is_ready, 300)

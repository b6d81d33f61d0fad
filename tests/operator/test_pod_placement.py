"""What placement, limits, shared memory and claims of devices become in the pods."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from builders import CONFIG, isvc

from argosy_operator.desired.children import deployment_problem, plan_children
from argosy_operator.observation import Observation

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
OWN = {
    "matchLabels": {"app.kubernetes.io/component": "engine", "inference.argosy.dev/service": "tiny"},
}


def pod_spec(**spec: Any) -> dict[str, Any]:
    made = plan_children(isvc(**spec), Observation(), CONFIG)
    return made.deployment["spec"]["template"]["spec"]


def container(**spec: Any) -> dict[str, Any]:
    (only,) = pod_spec(**spec)["containers"]
    return only


def test_nothing_is_asked_for_by_default() -> None:
    absent = {"affinity", "topologySpreadConstraints", "runtimeClassName", "schedulerName", "resourceClaims"}
    assert not absent & pod_spec().keys()
    assert "serviceAccountName" not in pod_spec()
    assert "resources" in container()
    assert container()["resources"] == {}


def test_a_term_about_pods_means_the_services_own() -> None:
    term = {"topologyKey": "kubernetes.io/hostname"}
    affinity = pod_spec(
        placement={
            "affinity": {
                "podAntiAffinity": {REQUIRED: [term], PREFERRED: [{"weight": 5, "podAffinityTerm": term}]}
            }
        }
    )["affinity"]
    wanted = {"topologyKey": "kubernetes.io/hostname", "labelSelector": OWN}
    assert affinity == {
        "podAntiAffinity": {REQUIRED: [wanted], PREFERRED: [{"weight": 5, "podAffinityTerm": wanted}]}
    }


def test_a_term_keeps_the_pods_that_it_names() -> None:
    term = {
        "topologyKey": "zone",
        "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
        "namespaces": ["web"],
        "namespaceSelector": {},
        "matchLabelKeys": ["pod-template-hash"],
    }
    affinity = pod_spec(placement={"affinity": {"podAffinity": {REQUIRED: [term]}}})["affinity"]
    assert affinity == {"podAffinity": {REQUIRED: [term]}}


def test_every_pod_and_every_namespace_can_be_meant() -> None:
    """An empty selector selects everything, a missing one the service's replicas."""
    term = {"topologyKey": "zone", "labelSelector": {}, "namespaceSelector": {}}
    affinity = pod_spec(placement={"affinity": {"podAffinity": {REQUIRED: [term]}}})["affinity"]
    assert affinity["podAffinity"][REQUIRED] == [term]


def test_affinity_of_nodes_is_passed_on() -> None:
    gpu = {"key": "gpu", "operator": "In", "values": ["h100", "h200"]}
    spot = {"key": "spot", "operator": "DoesNotExist"}
    wanted = {
        "nodeAffinity": {
            REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [gpu, spot]}]},
            PREFERRED: [{"weight": 1, "preference": {"matchExpressions": [spot]}}],
        }
    }
    assert pod_spec(placement={"affinity": wanted})["affinity"] == wanted


def test_replicas_are_spread_over_domains() -> None:
    constraints = pod_spec(
        placement={
            "topologySpreadConstraints": [
                {"topologyKey": "zone", "matchLabelKeys": ["pod-template-hash"]},
                {"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}},
            ]
        }
    )["topologySpreadConstraints"]
    assert constraints == [
        {
            "topologyKey": "zone",
            "maxSkew": 1,
            "whenUnsatisfiable": "DoNotSchedule",
            "matchLabelKeys": ["pod-template-hash"],
            "labelSelector": OWN,
        },
        {"topologyKey": "host", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}},
    ]


def test_runtime_and_scheduler() -> None:
    spec = pod_spec(placement={"runtimeClassName": "nvidia", "schedulerName": "gang"})
    assert (spec["runtimeClassName"], spec["schedulerName"]) == ("nvidia", "gang")


@pytest.mark.parametrize(
    ("placement", "account", "token"),
    [
        ({}, None, False),
        ({"serviceAccountName": "models"}, "models", False),
        ({"serviceAccountName": "models", "automountServiceAccountToken": True}, "models", True),
        ({"automountServiceAccountToken": True}, None, False),
    ],
)
def test_a_token_is_mounted_on_request_only(
    placement: dict[str, Any], account: str | None, token: bool
) -> None:
    spec = pod_spec(placement=placement)
    assert (spec.get("serviceAccountName"), spec["automountServiceAccountToken"]) == (account, token)


@pytest.mark.parametrize("source", ["builtin://tiny", "hf://org/name"])
def test_a_pod_can_be_guaranteed(source: str) -> None:
    """Which takes equal requests and limits of every container."""
    spec = pod_spec(model={"source": source}, resources={"cpu": 4, "cpuLimit": "4", "memory": "16Gi"})
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    assert len(containers) == (1 if source == "builtin://tiny" else 2)
    for each in containers:
        assert each["resources"] == {
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"cpu": "4", "memory": "16Gi"},
        }


@pytest.mark.parametrize(("resources", "size"), [({}, "1Gi"), ({"sharedMemory": "8Gi"}, "8Gi")])
def test_size_of_shared_memory(resources: dict[str, Any], size: str) -> None:
    volumes = {volume["name"]: volume for volume in pod_spec(resources=resources)["volumes"]}
    assert volumes["argosy-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def test_devices_are_claimed_for_the_engine_alone() -> None:
    spec = pod_spec(
        model={"source": "hf://org/name"},
        resources={
            "claims": [
                {"name": "gpu", "resourceClaimTemplateName": "h200", "request": "one"},
                {"name": "nic", "resourceClaimName": "rdma"},
            ]
        },
    )
    assert spec["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": "h200"},
        {"name": "nic", "resourceClaimName": "rdma"},
    ]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "2", "memory": "7168Mi"},
        "claims": [{"name": "gpu", "request": "one"}, {"name": "nic"}],
    }
    assert spec["initContainers"][0]["resources"] == {}


def test_a_slice_of_a_gpu_is_an_extended_resource() -> None:
    slices = container(resources={"gpu": {"resourceName": "nvidia.com/mig-1g.10gb"}})["resources"]
    assert slices == {
        "requests": {"cpu": "2", "memory": "7168Mi", "nvidia.com/mig-1g.10gb": "1"},
        "limits": {"nvidia.com/mig-1g.10gb": "1"},
    }


@pytest.mark.parametrize(
    ("allowed", "account", "is_refused"),
    [
        ((), None, False),
        ((), "models", True),
        (("other",), "models", True),
        (("other", "models"), "models", False),
        (("*",), "models", False),
    ],
)
def test_an_account_needs_the_administrators_consent(
    allowed: tuple[str, ...], account: str | None, is_refused: bool
) -> None:
    service = isvc(placement={"serviceAccountName": account} if account else {})
    problem = deployment_problem(service, dataclasses.replace(CONFIG, engine_service_accounts=allowed))
    assert (problem is not None) is is_refused
    if problem is not None:
        assert problem.reason == "ServiceAccountNotAllowed"
        assert "engine.serviceAccounts" in problem.message

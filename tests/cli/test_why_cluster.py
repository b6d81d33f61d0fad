"""`argosy why` of a cluster: what kubectl reads, and what is told of routers, operator and what may not be read."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from fake_kubectl import fake_kubectl
from why_cases import CASES
from why_objects import (
    Object,
    condition,
    pod,
    service,
)

from argosy.cluster_chain import cluster_diagnosis, log_source, num_ready, operator_absence, router_service
from argosy.commands import cluster
from argosy.commands.cluster import Kubectl
from argosy.diagnosis import Diagnosis, render
from argosy.errors import FAILURE, OK, CommandError

URL = "http://argosy-router.argosy-system.svc:8080/v1"
NOW = datetime.datetime(2026, 11, 27, 12, tzinfo=datetime.UTC)
READY = service(condition("Ready", "True", "ReplicasRoutable"))
READY["status"]["url"] = URL
HELD = {"spec": {"holderIdentity": "argosy-operator-0", "renewTime": "2026-11-27T11:59:58.000000Z"}}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (URL, ("argosy-system", "argosy-router")),
        ("https://argosy-router.a.svc.cluster.local/v1", ("a", "argosy-router")),
        ("https://models.example.com/v1", None),
        ("http://[::1/v1", None),
        ("", None),
    ],
)
def test_the_routers_service_is_that_of_the_status(url: str, expected: tuple[str, str] | None) -> None:
    assert router_service({"status": {"url": url}}) == expected
    assert router_service({}) is None


def test_endpoints_count_once_and_only_while_they_are_ready() -> None:
    def endpoint(name: str, *, ready: bool | None) -> Object:
        return {"addresses": ["x"], "conditions": {"ready": ready}, "targetRef": {"name": name}}

    ipv4 = {"endpoints": [endpoint("a", ready=True), endpoint("b", ready=False), endpoint("c", ready=None)]}
    assert num_ready([ipv4, {"endpoints": [endpoint("a", ready=True)]}, {"endpoints": None}]) == 2
    assert num_ready([]) == 0


@pytest.mark.parametrize(
    ("lease", "told"),
    [
        (HELD, ""),
        ({"spec": {**HELD["spec"], "renewTime": "2026-11-27T11:57:00Z"}}, "last renewed at 2026-11-27T11:57"),
        ({"spec": {"holderIdentity": ""}}, "nobody holds Lease argosy-system/argosy-operator"),
        ({"spec": {"holderIdentity": "a", "renewTime": None}}, ""),
        (None, "there is no Lease argosy-system/argosy-operator"),
    ],
)
def test_an_operator_that_does_not_run_is_known_by_its_lease(lease: Object | None, told: str) -> None:
    found = operator_absence(lease, "argosy-system", NOW)
    assert told in found
    assert bool(found) is bool(told)


def installed(tmp_path: Path, endpoints: Object, lease: Object, resource: Object = READY) -> Diagnosis:
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices": resource,
            "get pods": {"items": [pod()]},
            "get endpointslices.discovery.k8s.io --namespace argosy-system "
            "--selector kubernetes.io/service-name=argosy-router": endpoints,
            "get leases.coordination.k8s.io argosy-operator --namespace argosy-system": lease,
            "get leases.coordination.k8s.io --all-namespaces --field-selector metadata.name=argosy-operator": lease,
            "get events": {"items": []},
        },
    )
    return cluster.in_cluster(Kubectl(program=program), "qwen")


ONE_ROUTER = {"items": [{"endpoints": [{"addresses": ["10.0.0.1"]}]}]}
NO_LEASE = {"error": 'Error from server (NotFound): leases "argosy-operator" not found'}
FORBIDDEN = {"error": "Error from server (Forbidden): leases is forbidden"}


def test_after_an_uninstall_the_last_status_is_not_believed(tmp_path: Path) -> None:
    found = installed(tmp_path, {"items": []}, {"spec": {"holderIdentity": ""}})
    assert (found.links[-1].name, found.links[-1].state, found.is_served) == ("router", "failed", False)
    text = render(found)
    assert "Service argosy-system/argosy-router has no endpoint that is ready" in text
    assert "note: no operator runs: nobody holds Lease argosy-system/argosy-operator" in text
    assert "clients are served" not in text


def test_without_an_operator_routers_serve_and_it_is_told(tmp_path: Path) -> None:
    found = installed(tmp_path, ONE_ROUTER, NO_LEASE)
    assert (found.links[-1].name, found.is_served) == ("ready", True)
    assert [link.name for link in found.links][-3:] == ["routable", "router", "ready"], "pods are looked at"
    assert "no operator runs: there is no Lease" in render(found)


def test_what_may_not_be_read_is_no_problem(tmp_path: Path) -> None:
    found = installed(tmp_path, FORBIDDEN, FORBIDDEN)
    assert ([link.name for link in found.links], found.notes) == (["manifest", "ready"], ())


def refusing(reason: str) -> Object:
    """A Lease, renewed just now, whose holder cannot read the namespace of the service."""
    renewed = datetime.datetime.now(datetime.UTC).isoformat()
    told = {"inference.argosy.dev/unreadable-namespaces": json.dumps({"team": reason, "other": "NoAnswer"})}
    metadata = {"name": "argosy-operator", "namespace": "argosy-system", "annotations": told}
    return {"metadata": metadata, "spec": {"holderIdentity": "a", "renewTime": renewed}}


NEVER_SEEN = service(seen=-1)
del NEVER_SEEN["status"]


@pytest.mark.parametrize(
    ("resource", "reason", "place"),
    [
        (READY, "Forbidden", "note: "),
        ({**READY, "status": {**READY["status"], "observedGeneration": 2}}, "Forbidden", "operator "),
        (NEVER_SEEN, "Forbidden", "operator "),
        (NEVER_SEEN, "NamespaceGone", "operator "),
        (READY, "NoAnswer", "note: "),
    ],
    ids=["ready", "an edit is not seen", "never seen", "gone", "no answer"],
)
def test_a_namespace_that_the_operator_cannot_read_is_named(
    resource: Object, reason: str, place: str, tmp_path: Path
) -> None:
    lease = refusing(reason)
    found = installed(tmp_path, ONE_ROUTER, {"items": [lease]} if resource is NEVER_SEEN else lease, resource)
    text = render(found)
    (line,) = (each for each in text.splitlines() if "cannot read namespace team" in each)
    assert place in line
    assert "no operator runs" not in text
    assert "kubectl describe lease -n argosy-system argosy-operator" in text
    if "NoAnswer" not in line:
        assert "RoleBinding argosy-operator-argosy-system" in text
        assert "watchNamespaces" in text
    assert found.is_served is (resource is READY)
    assert any(each.name == "pods" for each in found.links) is (resource is READY), "its status is an old one"


def test_a_namespace_that_is_not_watched_is_told_as_such(tmp_path: Path) -> None:
    text = render(installed(tmp_path, ONE_ROUTER, refusing("NotWatched")))
    assert "has no watch of namespace team" in text
    assert "cannot read" not in text
    assert "RoleBinding" not in text


@pytest.mark.parametrize(
    "told",
    [
        "no JSON",
        "[]",
        '{"elsewhere": "Forbidden"}',
        "",
        '{"team": "run `kubectl delete ns team`"}',
        '{"*": "\\u001b[2J"}',
    ],
)
def test_what_a_lease_does_not_say_of_a_namespace_is_no_problem(told: str, tmp_path: Path) -> None:
    lease = refusing("Forbidden")
    lease["metadata"]["annotations"] = {"inference.argosy.dev/unreadable-namespaces": told}
    assert "cannot read" not in render(installed(tmp_path, ONE_ROUTER, lease))


@pytest.mark.parametrize(
    ("resource", "routable", "is_served"),
    [
        (READY, 2, True),
        (service(condition("Ready", "False", "RolloutHalted", "pod a does not come up")), 2, True),
        (service(condition("Ready", "False", "RolloutHalted", "pod a does not come up")), 0, False),
        (
            service(
                condition("Ready", "False", "NoRouter", "no router"),
                condition("Routable", "Unknown", "NoRouter"),
            ),
            2,
            False,
        ),
        (service(condition("Ready", "True"), seen=2), 2, False),
    ],
    ids=["ready", "halted", "halted, and none serves", "no router", "an edit is not seen"],
)
def test_without_the_right_to_read_pods_the_status_is_told(
    resource: Object, routable: int, is_served: bool, tmp_path: Path
) -> None:
    resource = {**resource, "status": {**resource["status"], "routableReplicas": routable}}
    pods = {"error": 'Error from server (Forbidden): pods is forbidden: User "a" cannot list'}
    program = fake_kubectl(tmp_path, {"get inferenceservices": resource, "get pods": pods, "get": FORBIDDEN})
    found = cluster.in_cluster(Kubectl(program=program), "qwen")
    text = render(found)
    assert found.is_served is is_served, text
    assert "note: its pods could not be read" in text
    assert "pods is forbidden" in text
    assert not any(link.name in ("pods", "node", "engine") for link in found.links)


def test_a_kubelets_word_on_a_log_that_is_gone_is_no_log(tmp_path: Path) -> None:
    resource, pods, *_ = CASES["an engine that exits"]
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices": resource,
            "get pods": {"items": pods},
            "logs qwen-0": {"text": "unable to retrieve container logs for containerd://0123\n"},
            "get events": {"items": []},
        },
    )
    found = cluster.in_cluster(Kubectl(program=program), "qwen")
    assert found.links[-1].lines == ()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("a fetch that goes on", ("fetch-model", False)),
        ("a fetch that failed", ("fetch-model", True)),
        ("an engine that exits", ("engine", True)),
        ("too little memory", ("engine", False)),
        ("a load", ("engine", False)),
        ("no image", None),
        ("all is well", None),
    ],
)
def test_whose_log_is_read(case: str, expected: tuple[str, bool] | None) -> None:
    (only,) = CASES[case][1]
    assert log_source(only) == expected


def test_the_cluster_is_read_with_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resource, pods, *_ = CASES["an engine that exits"]
    fake_kubectl(
        tmp_path,
        {
            "--namespace=team get inferenceservices.inference.argosy.dev qwen -o json": resource,
            "get pods --selector inference.argosy.dev/service=qwen": {"items": pods},
            "logs qwen-0 -c engine --tail=100 --previous": {"text": "one\nValueError: it is too long\n"},
            "get events": {"items": []},
        },
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert cluster.why(["qwen", "-n", "team"]) == FAILURE
    shown = capsys.readouterr().out
    assert "ValueError: it is too long" in shown
    assert cluster.why(["qwen", "-n", "team", "-o", "json"], cluster=True) == FAILURE
    assert json.loads(capsys.readouterr().out)["links"][-1]["name"] == "engine"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "there are: none"),
        (["b", "a"], "there are: a, b$"),
        ([f"s{n:02}" for n in range(12)], "s09 and 2 more"),
    ],
)
def test_a_service_must_be_named_unless_there_is_one(names: list[str], told: str, tmp_path: Path) -> None:
    resource, pods, *_ = CASES["all is well"]
    listed = {"items": [{"metadata": {"name": name}} for name in names]}
    program = fake_kubectl(tmp_path, {"get inferenceservices.inference.argosy.dev -o": listed})
    with pytest.raises(CommandError, match=f"name a service; .*{told}"):
        cluster.in_cluster(Kubectl(program=program), None)
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices.inference.argosy.dev -o": {"items": [{"metadata": {"name": "qwen"}}]},
            "get inferenceservices.inference.argosy.dev qwen": resource,
            "get pods": {"items": pods},
            "get events": {"items": []},
        },
    )
    assert cluster.in_cluster(Kubectl(program=program), None).is_served


def test_what_kubectl_says_of_an_error_moves_no_cursor(tmp_path: Path) -> None:
    program = fake_kubectl(tmp_path, {"get": {"error": "Error from server: \x1b[2Jall is well"}})
    with pytest.raises(CommandError, match=r"\?\[2Jall is well"):
        cluster.in_cluster(Kubectl(program=program), "qwen")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            {
                "get inferenceservices.inference.argosy.dev qwen": {
                    "error": 'Error from server (NotFound): inferenceservices "qwen" not found'
                },
                "get inferenceservices.inference.argosy.dev -o": {"items": [{"metadata": {"name": "qwen3"}}]},
            },
            "there are: qwen3",
        ),
        (
            {"get": {"error": "error: the server doesn't have a resource type 'inferenceservices'"}},
            "install the chart",
        ),
        ({"get": {"error": "Unable to connect to the server: dial tcp: refused"}}, "dial tcp: refused"),
        (
            {
                "get": {
                    "error": "Error from server (NotFound): the server could not find the requested resource"
                }
            },
            "is not a cluster. Without a kubeconfig it asks localhost:8080",
        ),
    ],
    ids=["no such service", "no such kind", "no cluster", "a router at localhost:8080"],
)
def test_what_cannot_be_read_is_said(answers: dict[str, Object], said: str, tmp_path: Path) -> None:
    program = fake_kubectl(tmp_path, answers)
    with pytest.raises(CommandError, match=re.escape(said)):
        cluster.in_cluster(Kubectl(program=program), "qwen")


def test_without_kubectl_the_remedy_is_named() -> None:
    with pytest.raises(CommandError, match="is not installed"):
        Kubectl(program="no-such-kubectl").get("pods")


def test_a_volume_that_does_not_mount_is_told_by_its_event(tmp_path: Path) -> None:
    resource, pods, *_ = CASES["no volume yet"]
    event = {
        "reason": "FailedMount",
        "message": 'secret "token" not found',
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices": resource,
            "get pods": {"items": pods},
            "get events --field-selector involvedObject.name=qwen-0,type=Warning": {"items": [event]},
        },
    )
    found = cluster.in_cluster(Kubectl(program=program), "qwen")
    assert (found.links[-1].name, found.links[-1].state) == ("volumes", "failed")
    assert 'FailedMount: secret "token" not found' in render(found)


def test_who_makes_a_services_key_anew_is_told() -> None:
    resource, (hangs,), *_ = CASES["no volume yet"]
    hangs = msgspec.json.decode(msgspec.json.encode(hangs))
    hangs["spec"]["volumes"] = [
        {"name": "mine", "secret": {"secretName": "token"}},
        {"name": "argosy-key", "secret": {"secretName": "qwen-engine-key"}},
    ]
    for name, told in (
        ("qwen-engine-key", "the operator makes the Secret"),
        ("token", "what the event names"),
    ):
        event = f'FailedMount: MountVolume.SetUp failed for volume "v" : secret "{name}" not found'
        found = cluster_diagnosis(resource, [hangs], events=[event])
        assert found.links[-1].name == "volumes"
        assert told in found.links[-1].remedy


def test_the_exit_code_says_whether_clients_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource, pods, *_ = CASES["all is well"]
    fake_kubectl(
        tmp_path,
        {"get inferenceservices": resource, "get pods": {"items": pods}, "get events": {"items": []}},
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert cluster.why(["qwen", "--cluster"]) == OK

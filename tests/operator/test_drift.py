"""Differences between a live object and the wanted manifest."""

from __future__ import annotations

from typing import Any

import pytest
from builders import CONFIG, isvc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy_operator.desired.children import plan_children
from argosy_operator.desired.diff import additions, clashes, contains, must_apply, with_applied_hash
from argosy_operator.observation import Observation


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"a": 1, "server": "default"}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": 1}, False),
        ({}, {"value": ""}, True),
        ({}, {"readOnly": False}, True),
        ({}, {"list": []}, True),
        ({}, {"emptyDir": {}}, False),
        ({"list": [{"name": "a", "default": 1}]}, {"list": [{"name": "a"}]}, True),
        ({"list": [{"name": "a"}, {"name": "sidecar"}]}, {"list": [{"name": "a"}]}, False),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1000m"}}, True),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1001m"}}, False),
        ({"requests": {"cpu": "500u"}}, {"requests": {"cpu": "0.0005"}}, True),
        ({"requests": {"cpu": "1n"}}, {"requests": {"cpu": "0.000000001"}}, True),
        ({"limits": {"memory": "2Pi"}}, {"limits": {"memory": "2048Ti"}}, True),
        ({"limits": {"memory": "1E"}}, {"limits": {"memory": "1000000000000000000"}}, True),
        ({"limits": {"memory": "2Pi"}}, {"limits": {"memory": "2Ti"}}, False),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "\N{SUPERSCRIPT TWO}"}}, False),
        ({"labels": {"a": "1"}}, {"labels": {"a": "1000m"}}, False),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1024Mi"}}, True),
        ({"spec": {"selector": {"a": "b"}}}, {"spec": {"selector": {"a": "b"}}}, True),
        ({"spec": {"selector": {"a": "b", "c": "d"}}}, {"spec": {"selector": {"a": "b"}}}, False),
        ({"nodeSelector": {"a": "b", "c": "d"}}, {"nodeSelector": {"a": "b"}}, False),
        ({"image": "x", "env": [{"name": "A"}]}, {"image": "x"}, False),
        ({"image": "x", "env": []}, {"image": "x"}, True),
        ({"hostNetwork": True}, {}, False),
        ({"hostNetwork": False}, {}, True),
        ({"securityContext": {"runAsUser": 0}}, {"securityContext": {}}, False),
        (
            {"labels": {"env": "prod"}, "annotations": {"command": "x"}},
            {"labels": {}, "annotations": {}},
            True,
        ),
        ({"serviceAccountName": "a", "serviceAccount": "a"}, {"serviceAccountName": "a"}, True),
        (
            {"securityContext": {"capabilities": {"add": ["X"]}}},
            {"securityContext": {"capabilities": {}}},
            False,
        ),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, {"ports": [{"containerPort": 1}]}, False),
        ({"limits": {"cpu": "1", "memory": "1"}}, {"limits": {"memory": "1"}}, False),
        ({"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "securityContext": {}}, {}, True),
    ],
)
def test_contains(live: Any, wanted: Any, same: bool) -> None:
    assert contains(live, wanted) is same


def test_additions_are_named_from_the_last_one_of_a_list_to_the_first() -> None:
    def template(**more: Any) -> dict[str, Any]:
        engine = {
            "name": "engine",
            "env": [{"name": "OURS", "value": "1"}],
            "ports": [{"containerPort": 8000}],
        }
        return {"spec": {"template": {"spec": {"containers": [engine | more]}}}}

    live = template(
        env=[{"name": "A"}, {"name": "OURS", "value": "1"}, {"name": "B"}],
        ports=[{"containerPort": 8000, "protocol": "TCP"}, {"containerPort": 8000, "protocol": "UDP"}],
        imagePullPolicy="IfNotPresent",
        command=["sh"],
    )
    pod = live["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "sidecar"})
    pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirst"}
    inside = ("spec", "template", "spec")
    assert additions(live, template()) == [
        (*inside, "hostNetwork"),
        (*inside, "containers", 1, "command"),
        (*inside, "containers", 1, "env", 2),
        (*inside, "containers", 1, "env", 0),
        (*inside, "containers", 1, "ports", 1),
        (*inside, "containers", 0),
    ]
    assert additions(template(), template()) == []


@pytest.mark.parametrize(
    ("live", "wanted", "expected"),
    [
        (
            {"serviceAccountName": "a", "serviceAccount": "a"},
            {},
            [("serviceAccountName",), ("serviceAccount",)],
        ),
        ({"labels": {"env": "prod"}}, {"labels": {"a": "b"}}, []),
        ({"resources": {"limits": {"a/b": "1"}}}, {"resources": {"limits": {}}}, [("resources", "limits", "a/b")]),
        ({"resources": {"claims": [{"name": "a"}]}}, {"resources": {}}, [("resources", "claims")]),
        ({"securityContext": {"sysctls": [1], "x": 1}}, {"securityContext": {}}, [("securityContext", "sysctls")]),
    ],
)  # fmt: skip
def test_additions(live: Any, wanted: Any, expected: list[Any]) -> None:
    assert additions(live, wanted) == expected


@pytest.mark.parametrize(
    ("live", "wanted", "expected"),
    [
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "valueFrom": {"a": "b"}}]}, True),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}]}, False),
        ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A", "valueFrom": {}}]}, False),
        ({"env": [{"name": "B", "value": "1"}]}, {"env": [{"name": "A", "valueFrom": {}}]}, False),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, {"volumes": [{"name": "a", "secret": {}}]}, True),
        ({"args": ["a"]}, {"args": ["b"]}, False),
        (
            {"containers": [{"name": "other"}, {"name": "a", "env": [{"name": "A", "value": "1"}]}]},
            {"containers": [{"name": "a", "env": [{"name": "A", "valueFrom": {}}]}]},
            True,
        ),
    ],
)  # fmt: skip
def test_clashes(live: Any, wanted: Any, expected: bool) -> None:
    assert clashes(live, wanted) is expected


JSON = st.recursive(
    st.integers() | st.text(max_size=4) | st.booleans(),
    lambda nested: st.lists(nested, max_size=3) | st.dictionaries(st.text(max_size=3), nested, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4))
def test_an_object_contains_itself(obj: dict[str, Any]) -> None:
    assert contains(obj, obj)
    assert additions(obj, obj) == []
    assert not clashes(obj, obj)
    assert contains({**obj, "more": 1}, {key: value for key, value in obj.items() if key != "more"})


def test_the_applied_hash_shows_every_change() -> None:
    wanted = with_applied_hash(plan_children(isvc(), Observation(), CONFIG).deployment)
    assert not must_apply(wanted, wanted)
    assert must_apply(wanted, None)
    dropped = with_applied_hash(
        plan_children(isvc(placement={"nodeSelector": {"a": "b"}}), Observation(), CONFIG).deployment
    )
    assert contains(dropped["spec"]["selector"], wanted["spec"]["selector"])
    assert must_apply(wanted, dropped), "a field that is no longer wanted must go"


def test_what_an_overlay_leaves_out_is_no_difference() -> None:
    """The API server does not store empty lists."""
    volume = {"name": "site", "configMap": {"name": "site"}}
    made = plan_children(isvc(podTemplate={"spec": {"volumes": [volume]}}), Observation(), CONFIG)
    assert contains(volume, made.deployment["spec"]["template"]["spec"]["volumes"][-1])

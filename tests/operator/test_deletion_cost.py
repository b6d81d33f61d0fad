"""Which replicas are marked before a Deployment is made smaller."""

from __future__ import annotations

from builders import pod, pod_object

from argosy_operator.desired.scaling import cost_changes
from argosy_operator.observation import ReplicaUse, ServiceLoad
from argosy_operator.pod import Pod, read_pod


def marked(pods: list[Pod], removed: int, **values: float) -> dict[str, int]:
    """Costs to write, by the pod's name; `values` are the caches' by the same."""
    load = ServiceLoad(
        replicas={f"uid-{name}": ReplicaUse(cache_value=value) for name, value in values.items()}
    )
    return {change.pod.name: change.cost for change in cost_changes(pods, load, removed)}


def test_the_least_valuable_are_marked() -> None:
    pods = [pod("a", "1"), pod("b", "1"), pod("c", "1")]
    assert marked(pods, 1, a=3, b=1, c=2) == {"b": -1}
    assert marked(pods, 2, a=3, b=1, c=2) == {"b": -1, "c": -1}


def test_replicas_that_do_not_serve_go_before_any_other() -> None:
    pods = [pod("a", "1"), pod("b", "1", ready=False, gate=""), pod("c", "1")]
    assert marked(pods, 1, a=3, c=2) == {}
    assert marked(pods, 2, a=3, c=2) == {"c": -1}


def test_of_equals_the_newest_is_marked() -> None:
    pods = [pod("a", "1", created="2026-01-02T00:00:00Z"), pod("b", "1", created="2026-01-01T00:00:00Z")]
    assert marked(pods, 1) == {"a": -1}


def test_an_older_mark_is_taken_back() -> None:
    pods = [pod("a", "1", deletion_cost=-1), pod("b", "1"), pod("c", "1", deletion_cost=-1)]
    assert marked(pods, 1, a=3, b=1, c=2) == {"a": 0, "b": -1, "c": 0}
    (change,) = cost_changes([pods[0]], ServiceLoad(), 0)
    assert change.patch["metadata"]["annotations"] == {"controller.kubernetes.io/pod-deletion-cost": None}


def test_without_a_report_nothing_is_marked() -> None:
    assert cost_changes([pod("a", "1", deletion_cost=-1), pod("b", "1")], None, 1) == ()


def test_the_annotation_is_read() -> None:
    for text, cost in (("-1", -1), ("7", 7), ("much", 0)):
        found = pod_object("a")
        found["metadata"]["annotations"] = {"controller.kubernetes.io/pod-deletion-cost": text}
        assert read_pod(found).deletion_cost == cost
    assert read_pod(pod_object("a")).deletion_cost == 0

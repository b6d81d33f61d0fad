"""Namespaces that the API server does not let the operator read: what becomes of them, and of the others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import Any

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import ROUTER_POD, Operator
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.names import (
    CONFIGMAPS,
    DEPLOYMENTS,
    EVENTS,
    INFERENCE_SERVICES,
    LEASES,
    PODS,
    TURN_ANNOTATION,
    Kind,
)
from argosy_operator.reconcile.controller import WATCHED
from argosy_protocol.fleet import decode_fleet

SERVED = ("team", "other", "third")
LEASE = "argosy-operator"
OWN = "argosy-system"
SOON = 20
"""Seconds; a resync comes every 300."""
RETRIED = 70
"""Seconds after which a namespace that was refused for long is asked again."""


class Refusing(FakeKubernetes):
    """Refuses lists of some namespaces."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.refused: dict[str | None, int] = {}
        """HTTP status by namespace; 0 for no answer."""
        self.refused_kinds: frozenset[Kind] | None = None
        """The kinds that are refused there; None for every one."""
        self.gone: set[str] = set()
        """Namespaces of which the API server says that they do not exist."""
        self.lists: list[tuple[str | None, Kind]] = []

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        self.lists.append((namespace, kind))
        if namespace in self.refused and (self.refused_kinds is None or kind in self.refused_kinds):
            raise ApiError(
                f"GET /namespaces/{namespace}/{kind.plural}", self.refused[namespace], "is forbidden"
            )
        return await super().list(kind, namespace=namespace, labels=labels)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        if kind is LEASES and self.refused.get(OWN) == 0:
            raise ApiError("GET lease", 0, "TimeoutError")
        return await super().get(kind, namespace, name)

    async def has_namespace(self, name: str) -> bool | None:
        return False if name in self.gone else None

    def is_ready_in(self, namespace: str, name: str) -> bool:
        status = self.objects[INFERENCE_SERVICES, namespace, name].get("status", {})
        return any(
            (each["type"], each["status"]) == ("Ready", "True") for each in status.get("conditions", ())
        )

    def published(self) -> list[str]:
        return [each.qualified_name for each in decode_fleet(self.fleet()).services]

    def unreadable_events(self) -> list[Object]:
        return [
            obj
            for (kind, namespace, _), obj in self.objects.items()
            if kind is EVENTS and namespace == OWN and obj["involvedObject"]["kind"] == "Lease"
        ]


def refusing_cluster() -> Refusing:
    cluster = Refusing()
    cluster.create(ROUTER_POD)
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": LEASE, "namespace": OWN},
        "spec": {},
    }
    cluster.create(lease)
    return cluster


def operator_of(cluster: Refusing, **settings: Any) -> Operator:
    return Operator(cluster, **{"watch_namespaces": SERVED, **settings})


async def with_two_services(**settings: Any) -> Refusing:
    """A cluster in which an operator has made `team/tiny` and `other/small` ready, and has ended."""
    cluster = refusing_cluster()
    async with operator_of(cluster, **settings) as operator:
        cluster.create(isvc_object("tiny"))
        cluster.create(isvc_object("small", namespace="other"))
        await operator.settle()
    assert cluster.published() == ["other/small", "team/tiny"]
    return cluster


def unreadable(operator: Operator) -> dict[str, float]:
    """The metric, by namespace."""
    (metric,) = (
        each
        for each in operator.controller.metrics.registry.collect()
        if each.name == "argosy_operator_unreadable_namespaces"
    )
    return {sample.labels["watched_namespace"]: sample.value for sample in metric.samples}


@pytest.mark.parametrize("status", [403, 404, 400, 500, 0])
@virtual_time
async def test_after_a_restart_the_others_are_reconciled_and_routers_keep_what_they_know(status: int) -> None:
    cluster = await with_two_services()
    cluster.refused = {"team": status}
    async with operator_of(cluster) as operator:
        cluster.create(isvc_object("new", namespace="third"))
        await operator.settle()
        assert cluster.is_ready_in("third", "new")
        assert cluster.published() == ["other/small", "team/tiny", "third/new"]
        cluster.remove((INFERENCE_SERVICES, "other", "small"))
        await operator.settle()
        assert cluster.published() == ["team/tiny", "third/new"]
        assert operator.controller.unready_reason == ""

        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
        assert len(cluster.pods()) == 1, "nothing is done with what was not read"
        cluster.refused = {}
        await asyncio.sleep(RETRIED)
        await operator.settle()
        assert len(cluster.pods()) == 2
        assert unreadable(operator) == {}
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        await operator.settle()
        assert cluster.published() == ["third/new"]


@virtual_time
async def test_a_namespace_that_is_refused_later_stops_nobody_else() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster, resync_seconds=30) as operator:
        cluster.create(isvc_object("tiny"))
        cluster.create(isvc_object("small", namespace="other"))
        await operator.settle()
        cluster.refused = {"team": 403}
        await operator.controller.resync()
        resynced = operator.controller.resynced_at
        cluster.create(isvc_object("new", namespace="third"))
        await operator.settle()
        assert cluster.is_ready_in("third", "new")
        assert cluster.published() == ["other/small", "team/tiny", "third/new"]
        await asyncio.sleep(60)
        assert operator.controller.resynced_at > resynced, "the liveness probe looks at it"


@virtual_time
async def test_a_kind_that_is_refused_leaves_its_namespace_alone_until_it_is_read() -> None:
    """Without the Deployments of a service another one would be applied over it."""
    cluster = await with_two_services()
    before = len(cluster.writes)
    cluster.refused, cluster.refused_kinds = {"team": 403}, frozenset({DEPLOYMENTS})
    async with operator_of(cluster, engine_image="another") as operator:
        await operator.settle()
        assert not [name for _, _, name in cluster.writes[before:] if "tiny" in name]
        assert cluster.published() == ["other/small", "team/tiny"]
        cluster.refused = {}
        await asyncio.sleep(RETRIED)
        await operator.settle()
        assert [name for _, _, name in cluster.writes[before:] if "tiny" in name]


@virtual_time
async def test_a_refusal_is_told_once_with_its_remedy_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cluster = refusing_cluster()
    cluster.refused = {"team": 403}
    async with operator_of(cluster, lease=LEASE) as operator:
        cluster.create(isvc_object("small", namespace="other"))
        await operator.settle()
        await asyncio.sleep(1000)
        assert unreadable(operator) == {"team": 1}
        (event,) = cluster.unreadable_events()
        assert (event["type"], event["reason"]) == ("Warning", "NamespaceUnreadable")
        assert event["involvedObject"]["uid"] == cluster.objects[LEASES, OWN, LEASE]["metadata"]["uid"]
        for part in ("team", "403", "RoleBinding argosy-operator-argosy-system", "watchNamespaces"):
            assert part in event["message"]
        assert event["count"] == 1
        assert json.loads(operator.controller.lister.summary()) == {"team": "Forbidden"}
        warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
        told = Counter(each.name.rpartition(".")[2] for each in warnings if "team" in each.getMessage())
        assert told == {"lister": 1, "watches": 1}, "each of its lists is told once"

        cluster.refused = {}
        await asyncio.sleep(RETRIED)
        assert unreadable(operator) == {}
        assert json.loads(operator.controller.lister.summary()) == {}
        assert [each["reason"] for each in cluster.unreadable_events()] == [
            "NamespaceUnreadable",
            "NamespaceReadable",
        ]


@virtual_time
async def test_a_namespace_that_is_refused_is_asked_less_and_less() -> None:
    cluster = refusing_cluster()
    cluster.refused = {"team": 403}
    async with operator_of(cluster):
        await asyncio.sleep(300)
        cluster.lists.clear()
        await asyncio.sleep(240)
    assert 2 <= sum(each == ("team", PODS) for each in cluster.lists) <= 7


@virtual_time
async def test_one_answer_that_is_missing_is_no_unreadable_namespace() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster) as operator:
        await operator.settle()
        cluster.refused = {"team": 0}
        await operator.controller.resync()
        assert unreadable(operator) == {}
        await asyncio.sleep(SOON)
        assert unreadable(operator) == {"team": 1}


@virtual_time
async def test_an_api_server_that_is_away_is_asked_for_two_namespaces_only() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster) as operator:
        await operator.settle()
        cluster.refused = dict.fromkeys((*SERVED, OWN), 0)
        cluster.lists.clear()
        with pytest.raises(ApiError, match="no namespace can be read"):
            await operator.controller.resync()
        assert len(cluster.lists) == 2, "each takes until its deadline"


@virtual_time
async def test_two_namespaces_without_an_answer_keep_no_other_one_from_being_listed() -> None:
    cluster = refusing_cluster()
    cluster.refused = {"team": 0, "other": 0}
    async with operator_of(cluster) as operator:
        await asyncio.sleep(SOON)
        assert not operator.controller.unready_reason
        cluster.create(isvc_object("mine", namespace="third"))
        await operator.settle()
        assert cluster.is_ready_in("third", "mine")


@virtual_time
async def test_an_outage_has_no_events_when_it_is_over() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster, lease=LEASE) as operator:
        await operator.settle()
        cluster.refused = dict.fromkeys((*SERVED, OWN), 0)
        await operator.controller.lister.list_some([None])
        await asyncio.sleep(100)
        assert operator.controller.unready_reason
        cluster.refused = {}
        await asyncio.sleep(RETRIED)
        assert operator.controller.unready_reason == ""
        assert cluster.unreadable_events() == []


@virtual_time
async def test_if_none_can_be_read_the_operator_is_not_ready_and_says_why() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster) as operator:
        assert operator.controller.unready_reason
        await operator.settle()
        assert operator.controller.unready_reason == ""
        cluster.refused = dict.fromkeys(SERVED, 403)
        with pytest.raises(ApiError):
            await operator.controller.resync()
        reason = operator.controller.unready_reason
        assert all(part in reason for part in ("no namespace can be read", "team", "403"))
        cluster.refused = {}
        await asyncio.sleep(SOON)
        assert operator.controller.unready_reason == ""


@pytest.mark.parametrize("namespace", SERVED)
@virtual_time
async def test_a_start_waits_until_one_namespace_and_the_routers_can_be_read(namespace: str) -> None:
    cluster = refusing_cluster()
    cluster.refused = dict.fromkeys((*SERVED, OWN), 403)
    async with operator_of(cluster) as operator:
        await asyncio.sleep(SOON)
        assert operator.controller.unready_reason
        del cluster.refused[namespace]
        await asyncio.sleep(SOON)
        reason = operator.controller.unready_reason
        assert OWN in reason, "without the routers every service would lose its gates"
        del cluster.refused[OWN]
        await asyncio.sleep(SOON)
        assert operator.controller.unready_reason == ""


@virtual_time
async def test_entries_of_a_namespace_leave_only_when_the_api_server_says_that_it_is_gone() -> None:
    cluster = await with_two_services()
    cluster.refused = {"team": 403}
    async with operator_of(cluster) as operator:
        await operator.settle()
        await asyncio.sleep(1000)
        assert cluster.published() == ["other/small", "team/tiny"]
        cluster.gone = {"team"}
        await asyncio.sleep(RETRIED)
        assert cluster.published() == ["other/small"]
        assert unreadable(operator) == {"team": 1}
        assert json.loads(operator.controller.lister.summary()) == {"team": "NamespaceGone"}


@virtual_time
async def test_what_was_read_of_a_namespace_leaves_with_it() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster, resync_seconds=30) as operator:
        cluster.create(isvc_object("tiny"))
        await operator.settle()
        cluster.refused, cluster.gone = {"team": 403}, {"team"}
        await asyncio.sleep(RETRIED)
        assert cluster.published() == []


@virtual_time
async def test_a_server_that_knows_nothing_proves_no_namespace_gone() -> None:
    """Something else that answers every request with 404, say."""
    cluster = await with_two_services()
    cluster.refused, cluster.gone = {"team": 404}, {"team"}
    async with operator_of(cluster) as operator:
        await operator.settle()
        await asyncio.sleep(RETRIED)
        assert cluster.published() == ["other/small", "team/tiny"]


def has_the_turn(cluster: Refusing, namespace: str, name: str) -> bool:
    metadata = cluster.objects[DEPLOYMENTS, namespace, f"{name}-engine"]["metadata"]
    return TURN_ANNOTATION in metadata.get("annotations", {})


@virtual_time
async def test_a_turn_in_a_namespace_that_cannot_be_read_holds_up_no_other_service() -> None:
    cluster = await with_two_services()
    cluster.broken_images = {"another"}
    services = {"team": "tiny", "other": "small"}
    async with operator_of(cluster, engine_image="another") as operator:
        await operator.settle()
        (holder,) = (each for each, name in services.items() if has_the_turn(cluster, each, name))
        cluster.refused = {holder: 403}
        await operator.controller.resync()
        await operator.settle()
        assert all(has_the_turn(cluster, each, name) for each, name in services.items())


@virtual_time
async def test_a_namespace_whose_watches_fail_is_listed_at_once_and_not_again_and_again() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster) as operator:
        await operator.settle()
        cluster.lists.clear()
        cluster.refused = {"team": 403}
        await asyncio.sleep(SOON)
        for _ in range(100):
            operator.controller.lister.note_failed_watch("team", PODS, "GET pods: 403 Forbidden")
            await asyncio.sleep(0.01)
        assert unreadable(operator) == {"team": 1}
        assert {namespace for namespace, _ in cluster.lists} == {"team"}
        assert cluster.lists.count(("team", PODS)) == 1


@virtual_time
async def test_without_a_watch_for_a_minute_the_operator_is_not_ready_and_says_why() -> None:
    """Without cluster DNS, say: lists go by address."""
    cluster = refusing_cluster()
    async with operator_of(cluster, lease=LEASE) as operator:
        lister = operator.controller.lister
        await operator.settle()
        for namespace in SERVED:
            lister.begin_watches(namespace)
            lister.note_failed_watch(namespace, None, "GET https://api: no such host")
        await asyncio.sleep(50)
        assert operator.controller.unready_reason == ""
        await asyncio.sleep(15)
        reason = operator.controller.unready_reason
        assert all(part in reason for part in ("no watch of", "pods", "no such host")), reason
        assert unreadable(operator) == dict.fromkeys(SERVED, 1)
        assert len(cluster.unreadable_events()) == len(SERVED)
        cluster.create(isvc_object("tiny"))
        await operator.settle()
        assert cluster.is_ready_in("team", "tiny"), "lists, and what is known, are good enough"

        for kind in WATCHED:
            lister.note_watched("team", kind)
        await asyncio.sleep(1)
        assert operator.controller.unready_reason == ""
        assert unreadable(operator) == {"other": 1, "third": 1}


@virtual_time
async def test_a_watch_that_begins_anew_in_time_is_none_that_is_missing() -> None:
    cluster = refusing_cluster()
    async with operator_of(cluster) as operator:
        lister = operator.controller.lister
        await operator.settle()
        lister.begin_watches("team")
        for kind in WATCHED:
            lister.note_watched("team", kind)
        for _ in range(10):
            await asyncio.sleep(30)
            lister.note_unwatched("team", PODS)
            await asyncio.sleep(30)
            lister.note_failed_watch("team", PODS, "GET pods: 503")
            lister.note_watched("team", PODS)
            assert unreadable(operator) == {}
        lister.note_unwatched("team", PODS)
        await asyncio.sleep(59)
        assert unreadable(operator) == {}
        await asyncio.sleep(2)
        assert unreadable(operator) == {"team": 1}
        lister.begin_watches("team")
        assert unreadable(operator) == {"team": 1}, "another beginning is no watch"


@virtual_time
async def test_a_namespace_whose_watches_begin_anew_has_no_other_one_listed() -> None:
    """Who may remove and restore a RoleBinding in one namespace costs the others nothing."""
    cluster = refusing_cluster()
    async with operator_of(cluster) as operator:
        cluster.create(isvc_object("tiny"))
        await operator.settle()
        resynced = operator.controller.resynced_at
        cluster.lists.clear()
        for _ in range(10):
            operator.controller.handle(INFERENCE_SERVICES, None, cluster.isvc())
            await asyncio.sleep(SOON)
        assert {namespace for namespace, _ in cluster.lists} == {"team"}
        assert len(cluster.lists) <= 10 * len(WATCHED)
        for _ in range(20):
            operator.controller.handle(INFERENCE_SERVICES, None, cluster.isvc())
            await asyncio.sleep(SOON)
        assert {namespace for namespace, _ in cluster.lists} == {*SERVED, OWN}, "what is due still comes"
        assert operator.controller.resynced_at > resynced


@virtual_time
async def test_a_namespace_that_is_listed_while_the_document_is_made_keeps_its_services() -> None:
    cluster = await with_two_services()
    cluster.refused = {"team": 500}
    get = cluster.get
    async with operator_of(cluster) as operator:
        await operator.settle()

        async def get_and_list(kind: Kind, namespace: str, name: str) -> Object | None:
            found = await get(kind, namespace, name)
            if kind is CONFIGMAPS:
                cluster.get = get  # type: ignore[method-assign]
                cluster.refused = {}
                await operator.controller.lister.list_some(["team"])
            return found

        cluster.get = get_and_list  # type: ignore[method-assign]
        documents: list[str] = []
        cluster.listeners.append(lambda kind, *_: documents.append(str(cluster.published())))
        cluster.create(isvc_object("new", namespace="third"))
        await operator.settle()
    assert [each for each in documents if "team/tiny" not in each] == []
    assert "third/new" in documents[-1]

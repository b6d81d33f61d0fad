"""Names between namespaces: who may claim which, who keeps one, and for how long it stays reserved."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from typing import Any

import pytest
from builders import isvc_object, namespace
from fake_kubernetes import FakeKubernetes, Object
from harness import Operator, new_cluster
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.names import CONFIGMAPS, INFERENCE_SERVICES
from argosy_operator.reconcile import fleet_publisher
from argosy_protocol.fleet import decode_fleet, resolve_names

CHAT = (INFERENCE_SERVICES, "team-a", "chat")


class Clock:
    """The operator's clock: RFC 3339."""

    def __init__(self) -> None:
        self.time = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    def __call__(self) -> str:
        return self.time.strftime("%Y-%m-%dT%H:%M:%SZ")

    def move(self, minutes: float) -> None:
        self.time += datetime.timedelta(minutes=minutes)


def service(
    key: str, served_name: str = "", *aliases: str, created: str = "2025-01-01T00:00:00Z", **spec: Any
) -> Object:
    where, name = key.split("/")
    model: Object = {"source": "builtin://tiny", "aliases": list(aliases)}
    if served_name:
        model["servedName"] = served_name
    obj = isvc_object(name, namespace=where, model=model, **spec)
    obj["metadata"]["creationTimestamp"] = created
    return obj


def owner(cluster: FakeKubernetes, name: str) -> str:
    """The service that routers know by a name; empty for none."""
    found = resolve_names(decode_fleet(cluster.fleet())).names.get(name)
    return "" if found is None else found.qualified_name


def degraded(cluster: FakeKubernetes, key: str) -> tuple[str, str]:
    """Reason and message of the condition."""
    where, name = key.split("/")
    found = cluster.condition("Degraded", name, namespace=where)
    return found["reason"], found.get("message", "")


@pytest.mark.parametrize("alias", ["team-a/chat", "team-a/anything/else", "team-a/chat:sql"])
@virtual_time
async def test_an_alias_that_begins_with_another_namespace_is_refused(alias: str) -> None:
    cluster = new_cluster()
    cluster.create(namespace("team-a"))
    async with Operator(cluster) as operator:
        cluster.create(service("team-b/thief", "", alias, "openai/gpt-oss-20b", "team-b/mine"))
        await operator.settle()
        assert owner(cluster, alias) == ""
        reason, message = degraded(cluster, "team-b/thief")
        assert reason == "NameRefused"
        assert f"'{alias}' is a name of namespace team-a" in message
        assert "gpt-oss" not in message
        for name in ("thief", "openai/gpt-oss-20b", "team-b/mine", "team-b/thief"):
            assert owner(cluster, name) == "team-b/thief"


@virtual_time
async def test_names_of_organisations_work_where_no_namespace_has_their_name() -> None:
    cluster = new_cluster()
    cluster.create(namespace("team-b"))
    async with Operator(cluster) as operator:
        cluster.create(service("team-a/chat", "openai/gpt-oss-20b", "google/gemma-3-1b-it"))
        await operator.settle()
        for name in ("openai/gpt-oss-20b", "google/gemma-3-1b-it"):
            assert owner(cluster, name) == "team-a/chat"
        assert degraded(cluster, "team-a/chat")[0] == "AsExpected"


@virtual_time
async def test_a_served_name_of_another_namespace_leaves_the_qualified_one() -> None:
    cluster = new_cluster()
    cluster.create(namespace("team-a"))
    async with Operator(cluster) as operator:
        cluster.create(service("team-b/thief", "team-a/chat"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == ""
        assert owner(cluster, "team-b/thief") == "team-b/thief"
        ready = cluster.condition("Ready", "thief", namespace="team-b")
        assert (ready["status"], ready["reason"]) == ("False", "NameRefused")
        assert cluster.isvc("thief", namespace="team-b")["status"]["model"] == "team-b/thief"


@virtual_time
async def test_a_namespace_that_appears_later_wins_its_names() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(service("team-b/first", "", "team-a/chat", "team-a/other"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == "team-b/first"
        cluster.create(namespace("team-a"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == "", "before there is such a service"
        reason, message = degraded(cluster, "team-b/first")
        assert reason == "NameRefused"
        assert "'team-a/chat' is a name of namespace team-a" in message
        cluster.create(service("team-a/chat", created="2026-01-01T00:00:00Z"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == "team-a/chat"


@virtual_time
async def test_a_namespace_is_known_by_its_services_where_namespaces_may_not_be_listed() -> None:
    cluster = new_cluster()

    def refuse(*args: Any, **options: Any) -> Any:
        raise ApiError("GET /api/v1/namespaces", 403, "namespaces is forbidden")

    cluster.list_pages = refuse  # type: ignore[method-assign]
    cluster.create(namespace("team-a"))
    async with Operator(cluster) as operator:
        cluster.create(service("team-b/first", "", "team-a/other"))
        await operator.settle()
        assert owner(cluster, "team-a/other") == "team-b/first", "nothing tells of the namespace"
        cluster.create(service("team-a/chat", created="2026-01-01T00:00:00Z"))
        await operator.settle()
        assert owner(cluster, "team-a/other") == ""
        assert degraded(cluster, "team-b/first")[0] == "NameRefused"


@virtual_time
async def test_served_namespaces_are_known_without_a_list() -> None:
    cluster = new_cluster()
    async with Operator(cluster, watch_namespaces=("team-a", "team-b")) as operator:
        cluster.create(service("team-b/first", "", "team-a/chat", "elsewhere/chat"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == ""
        assert owner(cluster, "elsewhere/chat") == "team-b/first"


@virtual_time
async def test_an_administrator_bounds_the_names_of_a_namespace() -> None:
    cluster = new_cluster()
    cluster.create(namespace("google"))
    patterns = {"team-b": ("b-*", "google/*"), "*": ("free-?",)}
    async with Operator(cluster, model_names=patterns) as operator:
        cluster.create(
            service(
                "team-b/one", "b-1", "gpt-x", "google/gemma", "team-b/mine", created="2024-01-01T00:00:00Z"
            )
        )
        cluster.create(service("team-c/two", "free-1", "free-12"))
        await operator.settle()
        assert [owner(cluster, name) for name in ("b-1", "google/gemma", "team-b/mine", "free-1")] == [
            *["team-b/one"] * 3,
            "team-c/two",
        ]
        assert [owner(cluster, name) for name in ("gpt-x", "free-12")] == ["", ""]
        assert degraded(cluster, "team-b/one")[1].startswith(
            "'gpt-x' is not among the names that the administrator allows namespace team-b (modelNames); "
        )
        assert degraded(cluster, "team-c/two")[0] == "NameRefused"


@virtual_time
async def test_a_name_stays_with_the_namespace_that_has_it() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(service("team-b/old", created="2024-01-01T00:00:00Z"))
        cluster.create(service("team-a/chat", "gpt-x", created="2025-01-01T00:00:00Z"))
        await operator.settle()
        cluster.edit("old", lambda spec: spec["model"].update(aliases=["gpt-x"]), namespace="team-b")
        await operator.settle()
        assert owner(cluster, "gpt-x") == "team-a/chat"
        assert "'gpt-x' belongs to team-a/chat, which had it first" in degraded(cluster, "team-b/old")[1]


@pytest.mark.parametrize(
    ("a_created", "why"),
    [
        ("2024-01-01T00:00:00Z", "belongs to team-a/chat, which is older"),
        ("2025-01-01T00:00:00Z", "belongs to team-a/chat, which is as old and comes first by name"),
    ],
)
@virtual_time
async def test_of_two_that_race_for_a_name_the_older_gets_it_and_the_other_is_told_why(
    a_created: str, why: str
) -> None:
    cluster = new_cluster()
    cluster.create(service("team-b/chat", "gpt-x", created="2025-01-01T00:00:00Z"))
    cluster.create(service("team-a/chat", "gpt-x", created=a_created))
    async with Operator(cluster) as operator:
        await operator.settle()
        assert owner(cluster, "gpt-x") == "team-a/chat"
        assert why in degraded(cluster, "team-b/chat")[1]


@virtual_time
async def test_a_service_is_told_that_a_qualified_name_is_not_its_own_and_not_that_the_other_is_older() -> (
    None
):
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(service("team-a/other", "", "team-a/chat", created="2024-01-01T00:00:00Z"))
        cluster.create(service("team-a/chat", "x", created="2025-01-01T00:00:00Z"))
        await operator.settle()
        assert "'team-a/chat' always names team-a/chat;" in degraded(cluster, "team-a/other")[1]


def by_deletion(cluster: FakeKubernetes) -> None:
    cluster.remove(CHAT)


def by_an_edit(cluster: FakeKubernetes) -> None:
    cluster.edit("chat", lambda spec: spec["model"].update(servedName="y"), namespace="team-a")


@pytest.mark.parametrize("end", [by_deletion, by_an_edit])
@virtual_time
async def test_a_name_stays_reserved_for_an_hour_against_other_namespaces(
    end: Callable[[FakeKubernetes], None],
) -> None:
    cluster, clock = new_cluster(), Clock()
    async with Operator(cluster, now=clock) as operator:
        cluster.create(service("team-a/chat", "gpt-x"))
        await operator.settle()
        end(cluster)
        cluster.create(service("team-b/late", "gpt-x", created="2024-01-01T00:00:00Z"))
        await operator.settle()
        assert owner(cluster, "gpt-x") == ""
        ready = cluster.condition("Ready", "late", namespace="team-b")
        assert ready["reason"] == "NameReserved"
        assert (
            "'gpt-x' is reserved until 2026-01-01T01:00:00Z for namespace team-a, which had it"
            in ready["message"]
        )
        document = cluster.fleet()
        clock.move(minutes=59)
    async with Operator(cluster, now=clock) as operator:  # it has remembered nothing
        await operator.settle()
        assert owner(cluster, "gpt-x") == ""
        assert cluster.fleet() == document, "the hour does not begin anew"
        clock.move(minutes=1)
    async with Operator(cluster, now=clock) as operator:
        await operator.settle()
        assert owner(cluster, "gpt-x") == "team-b/late"
        assert not decode_fleet(cluster.fleet()).reservations


@virtual_time
async def test_the_hour_ends_by_itself() -> None:
    cluster, clock = new_cluster(), Clock()
    async with Operator(cluster, now=clock, resync_seconds=1e9) as operator:
        cluster.create(service("team-a/chat", "gpt-x"))
        await operator.settle()
        cluster.remove(CHAT)
        cluster.create(service("team-b/late", "gpt-x"))
        await operator.settle()
        clock.move(minutes=61)
        await asyncio.sleep(3660)
        await operator.settle()
        assert owner(cluster, "gpt-x") == "team-b/late"


@virtual_time
async def test_a_namespace_takes_its_name_again_at_once() -> None:
    cluster, clock = new_cluster(), Clock()
    async with Operator(cluster, now=clock) as operator:
        cluster.create(service("team-a/chat", "gpt-x"))
        await operator.settle()
        cluster.remove(CHAT)
        cluster.create(service("team-b/late", "gpt-x", created="2024-01-01T00:00:00Z"))
        await operator.settle()
        cluster.create(service("team-a/again", "gpt-x", created="2026-01-01T00:00:00Z"))
        await operator.settle()
        assert owner(cluster, "gpt-x") == "team-a/again"
        assert "'gpt-x' belongs to team-a/again" in degraded(cluster, "team-b/late")[1]


@virtual_time
async def test_what_ends_while_no_operator_runs_is_reserved_as_well() -> None:
    cluster, clock = new_cluster(), Clock()
    async with Operator(cluster, now=clock) as operator:
        cluster.create(service("team-a/chat", "gpt-x"))
        await operator.settle()
    cluster.remove(CHAT)
    cluster.create(service("team-b/late", "gpt-x", "team-a/chat"))
    async with Operator(cluster, now=clock) as operator:
        await operator.settle()
        assert (owner(cluster, "gpt-x"), owner(cluster, "team-a/chat")) == ("", "")


@virtual_time
async def test_names_of_a_namespace_that_is_deleted_and_made_anew() -> None:
    cluster, clock = new_cluster(), Clock()
    cluster.create(namespace("team-a"))
    (kind,) = (each for each, _, name in cluster.objects if name == "team-a")
    async with Operator(cluster, now=clock) as operator:
        cluster.create(service("team-a/chat"))
        cluster.create(service("team-b/late", "", "team-a/chat", "team-a/new"))
        await operator.settle()
        cluster.remove(CHAT)
        cluster.remove((kind, "", "team-a"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == "", "reserved, though there is no such namespace"
        assert owner(cluster, "team-a/new") == "team-b/late"
        cluster.create(namespace("team-a"))
        await operator.settle()
        assert owner(cluster, "team-a/new") == ""
        cluster.create(service("team-a/chat"))
        await operator.settle()
        assert owner(cluster, "team-a/chat") == "team-a/chat"


@virtual_time
async def test_reservations_outlive_a_document_that_somebody_deletes() -> None:
    cluster, clock = new_cluster(), Clock()
    async with Operator(cluster, now=clock) as operator:
        cluster.create(service("team-a/chat", "gpt-x"))
        await operator.settle()
        (key,) = (each for each in cluster.objects if each[0] is CONFIGMAPS)
        cluster.remove(key)
        cluster.remove(CHAT)
        cluster.create(service("team-b/late", "gpt-x"))
        await operator.settle()
        assert owner(cluster, "gpt-x") == ""


@pytest.mark.parametrize("text", ["", "{", '{"services": null}', '{"later": ' + "[" * 100_000])
@virtual_time
async def test_a_document_that_cannot_be_read_is_written_anew(text: str) -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(service("team-a/chat", "gpt-x"))
        await operator.settle()
        (key,) = (each for each in cluster.objects if each[0] is CONFIGMAPS)
        cluster.objects[key]["data"] = dict.fromkeys(cluster.objects[key]["data"], text)
        cluster.remove(CHAT)
        cluster.create(service("team-b/late", "gpt-x"))
        await operator.settle()
        assert owner(cluster, "gpt-x") == ""


@virtual_time
async def test_whoever_fills_the_document_gets_no_name_of_a_service_that_it_pushes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_publisher, "MAX_DOCUMENT", 8000)
    cluster, clock = new_cluster(), Clock()
    aliases = [f"{number}-{'x' * 240}" for number in range(5)]
    async with Operator(cluster, now=clock) as operator:
        cluster.create(service("team-b/old", "old", created="2020-01-01T00:00:00Z"))
        cluster.create(service("team-a/big", "big", *(f"a{each}" for each in aliases)))
        cluster.create(service("team-a/large", "large", *(f"b{each}" for each in aliases)))
        cluster.create(service("team-a/new", "chat", *aliases[:2], created="2025-06-01T00:00:00Z"))
        await operator.settle()
        assert owner(cluster, "chat") == "team-a/new"
        for number in range(4):
            cluster.create(service(f"team-b/f{number}", "", *(f"f{number}-{each}" for each in aliases)))
        await operator.settle()
        assert owner(cluster, "chat") == "", "there is no room for it"
        cluster.edit("old", lambda spec: spec["model"].update(servedName="chat"), namespace="team-b")
        await operator.settle()
        assert owner(cluster, "chat") == ""
        assert degraded(cluster, "team-b/old")[0] == "NameConflict"
        for number in range(4):
            cluster.remove((INFERENCE_SERVICES, "team-b", f"f{number}"))
        await operator.settle()
        clock.move(minutes=61)
        await asyncio.sleep(3660)
        await operator.settle()
        assert owner(cluster, "chat") == "team-a/new"


@virtual_time
async def test_a_restart_does_not_take_back_that_a_name_is_lost() -> None:
    cluster = new_cluster()
    cluster.create(namespace("team-a"))
    for number in range(6):
        cluster.create(service(f"team-b/x{number}", f"team-a/chat{number}", replicas=0))
    async with Operator(cluster) as operator:
        await operator.settle()
        await asyncio.sleep(60)
    before = len(cluster.writes)
    async with Operator(cluster) as operator:
        await operator.settle()
        await asyncio.sleep(60)
    assert cluster.writes[before:] == []

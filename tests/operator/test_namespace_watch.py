"""Which namespaces exist, asked of an API server over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from builders import namespace
from fake_http import FakeApiServer
from fake_kubernetes import FakeKubernetes, Object
from harness import new_cluster
from served_cluster import served
from virtual_time import virtual_time

from argosy_operator.cluster.api import REFUSED_RETRY, RETRY, ApiError, ObjectList
from argosy_operator.cluster.kubernetes_api import KubernetesApi
from argosy_operator.cluster.watches import NamespaceWatch
from argosy_operator.names import NAMESPACES, Kind


@asynccontextmanager
async def watching(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *served_namespaces: str
) -> AsyncIterator[tuple[NamespaceWatch, asyncio.Event, FakeApiServer]]:
    """A watch that runs, and an event that is set with each change."""
    changed = asyncio.Event()
    async with served(cluster, tmp_path, monkeypatch) as server, await KubernetesApi.connect() as api:
        watch = NamespaceWatch(api, served_namespaces, on_change=changed.set)
        task = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(30):
                await watch.wait_answered()
                yield watch, changed, server
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_namespaces_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = new_cluster()
    for number in range(250):
        cluster.create(namespace(f"n{number}"))
    async with watching(cluster, tmp_path, monkeypatch) as (watch, changed, server):
        assert len(watch.names) == 250, "of several pages"
        changed.clear()
        await server.watch_began.wait()
        cluster.create(namespace("late"))
        await changed.wait()
        assert "late" in watch.names
        changed.clear()
        cluster.remove((NAMESPACES, "", "late"))
        await changed.wait()
        assert "late" not in watch.names
        assert {path for _, path, _, _ in server.requests} == {"/api/v1/namespaces"}


async def test_where_namespaces_are_listed_in_the_settings_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watching(new_cluster(), tmp_path, monkeypatch, "team", "other") as (watch, _, server):
        assert watch.names == {"team", "other"}
        await asyncio.sleep(0)
        assert server.requests == []


class Refusing(FakeKubernetes):
    def __init__(self) -> None:
        super().__init__()
        self.is_refused_list = True
        self.asked: list[float] = []

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        self.asked.append(asyncio.get_running_loop().time())
        if self.is_refused_list:
            raise ApiError("GET /api/v1/namespaces", 403, "is forbidden")
        return await super().list(kind, namespace=namespace, labels=labels)


@virtual_time
async def test_a_refusal_is_told_once_and_asked_again_seldom(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Refusing()
    cluster.create(namespace("team"))
    watch = NamespaceWatch(cluster, (), on_change=lambda: None)
    began = asyncio.get_running_loop().time()
    task = asyncio.create_task(watch.run())
    with caplog.at_level(logging.WARNING):
        await watch.wait_answered()
        await asyncio.sleep(3 * REFUSED_RETRY - 2 * RETRY - 1)
    assert [round(time - began) for time in cluster.asked] == [0, 5, 10, 310, 610]
    assert caplog.text.count("namespaces cannot be watched") == 1
    assert watch.names == frozenset()
    cluster.is_refused_list = False
    await asyncio.sleep(REFUSED_RETRY + RETRY)
    assert watch.names == {"team"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class NoWatch(Refusing):
    async def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        raise ApiError("WATCH /api/v1/namespaces", 403, "is forbidden")
        yield "", {}  # a generator


@virtual_time
async def test_a_watch_that_is_refused_where_the_list_is_not_is_told_once_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = NoWatch()
    cluster.is_refused_list = False
    cluster.create(namespace("team"))
    watch = NamespaceWatch(cluster, (), on_change=lambda: None)
    began = asyncio.get_running_loop().time()
    task = asyncio.create_task(watch.run())
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(2 * REFUSED_RETRY)
    assert [round(time - began) for time in cluster.asked] == [0, 5, 10, 310]
    assert caplog.text.count("namespaces cannot be watched") == 1
    assert watch.names == {"team"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@virtual_time
async def test_one_failure_does_not_have_names_decided_without_the_namespaces() -> None:
    cluster = Refusing()
    cluster.create(namespace("team"))
    watch = NamespaceWatch(cluster, (), on_change=lambda: None)
    task = asyncio.create_task(watch.run())
    asyncio.get_running_loop().call_later(1, setattr, cluster, "is_refused_list", False)
    await watch.wait_answered()
    assert watch.names == {"team"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

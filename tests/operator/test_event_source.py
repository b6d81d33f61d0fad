"""Watches that are refused: the real process over HTTP, in real time."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs

import kopf
import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.typedefs import Handler
from builders import CONFIG, isvc_object
from fake_http import FakeApiServer
from fake_kubernetes import FakeKubernetes
from harness import FakeRouter, http_fetch_of
from served_cluster import PATIENCE, served, served_app, until

from argosy_operator import event_source, main
from argosy_operator.cluster.kubernetes_api import LIST_PAGE
from argosy_operator.config import OperatorConfig
from argosy_operator.event_source import EndlessBackoff, kopf_settings
from argosy_operator.names import INFERENCE_SERVICES
from argosy_operator.reconcile import controller
from argosy_operator.reconcile.controller import WATCHED
from argosy_protocol.program.list_watch import PAGE_GROWTH
from processes import free_port

KINDS = len(WATCHED)
OPERATOR = OperatorConfig(
    namespace="argosy-system", fleet_key=CONFIG.fleet_key, engine_image="engine", router_url=""
)


@asynccontextmanager
async def running(health_port: int = 0) -> AsyncIterator[asyncio.Task[int]]:
    """An operator as its program runs it."""
    operator = asyncio.create_task(main.run(OPERATOR, health_port=health_port))
    try:
        yield operator
    finally:
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        # kopf retrieves no exception of a watch. asyncio reports one when the task is collected, with a traceback,
        # for which Python parses source: an `ast.parse` in which the collector begins would fail then.
        gc.collect()


class Hasty(EndlessBackoff):
    """As endless, but quicker."""

    def __iter__(self) -> Iterator[float]:
        return itertools.repeat(0.01)


@pytest.mark.parametrize(
    "statuses",
    [
        pytest.param([410] * KINDS, id="expired before the first event"),
        pytest.param([503] * 12 * KINDS, id="unavailable for longer than kopf's patience"),
        pytest.param([403] * 12 * KINDS, id="forbidden until the API server knows its rules"),
        pytest.param([404, 500, 410, 400], id="one after another"),
    ],
)
async def test_refused_watches_begin_anew(
    statuses: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(router))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    monkeypatch.setattr(event_source, "RESTART_PAUSE", 0.05)
    monkeypatch.setattr(event_source, "LIST_PAUSE", 0.01)
    monkeypatch.setattr(event_source, "EndlessBackoff", Hasty)
    monkeypatch.setattr(controller, "RELIST_PAUSE", 0.05)
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.watch_errors = list(statuses)
        async with running() as operator:
            await until(cluster, operator, lambda: not server.watch_errors and server.watches == KINDS)
            # What changes now is known by the watches alone: no resync is due for minutes.
            cluster.create(isvc_object(replicas=1))
            await until(cluster, operator, lambda: cluster.condition("Ready").get("status") == "True")
            cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
            await until(cluster, operator, lambda: '"services"' not in cluster.fleet())


async def test_watches_that_end_at_once_are_not_begun_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr(event_source, "WATCH_PAUSE", 0.2)
    server = FakeApiServer(cluster)
    begun: dict[str, list[float]] = {}

    @web.middleware
    async def ending(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.query.get("watch") != "true" or "allowWatchBookmarks" not in request.query:
            return await handler(request)
        begun.setdefault(request.path, []).append(asyncio.get_running_loop().time())
        return web.Response()

    app = server.app()
    app.middlewares.insert(0, ending)
    async with served_app(app, tmp_path, monkeypatch), running() as operator:
        await until(cluster, operator, lambda: len(begun) == KINDS and min(map(len, begun.values())) >= 5)
    pauses = [after - before for times in begun.values() for before, after in itertools.pairwise(times)]
    assert min(pauses) > 0.1


async def test_watches_that_are_told_that_their_version_expired_do_not_list_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf then lists all objects anew, whatever that costs: seconds of a core in a large fleet."""
    cluster = FakeKubernetes()
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr(event_source, "WATCH_PAUSE", 0.0)
    monkeypatch.setattr(event_source, "LIST_PAUSE", 0.2)
    server = FakeApiServer(cluster)
    listed: list[float] = []

    @web.middleware
    async def expiring(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.path.endswith("/pods") or "kopf" not in request.headers.get("User-Agent", ""):
            return await handler(request)
        if request.query.get("watch") == "true":
            return web.json_response({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
        listed.append(asyncio.get_running_loop().time())
        return await handler(request)

    app = server.app()
    app.middlewares.insert(0, expiring)
    async with served_app(app, tmp_path, monkeypatch), running() as operator:
        await until(cluster, operator, lambda: len(listed) >= 4)
    pauses = [after - before for before, after in itertools.pairwise(listed)]
    assert [pause > 0.9 * 0.2 * 2**number for number, pause in enumerate(pauses)] == [True] * len(pauses)


async def test_a_finalizer_of_kopf_s_that_a_tenant_sets_is_not_asked_away_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf would remove it, which the operator has no permission for: it asked again every five seconds, while all
    further events of the object were kept in memory, and none was handled."""
    cluster = FakeKubernetes()
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    obj = isvc_object(replicas=1)
    finalizers = [kopf_settings(WATCHED).persistence.finalizer]
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.authorize = lambda verb, _, resource, *__: (verb, resource) != ("patch", "inferenceservices")
        async with running() as operator:
            await until(cluster, operator, lambda: server.watches == KINDS)
            cluster.create({**obj, "metadata": {**obj["metadata"], "finalizers": finalizers}})
            await until(cluster, operator, lambda: cluster.condition("Ready").get("status") == "True")
            # Its watch alone tells of an edit: no resync is due for minutes.
            cluster.edit("tiny", lambda spec: spec.update(replicas=2))
            await until(cluster, operator, lambda: len(cluster.pods()) == 2)
    assert server.forbidden == []


@pytest.mark.parametrize("told", ["86400", "1e9", "Wed, 21 Oct 2099 07:28:00 GMT"])
async def test_a_busy_api_server_has_no_watch_wait_for_as_long_as_it_likes(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr(event_source, "RETRY_AFTER_MAX", 0)
    server = FakeApiServer(cluster)
    refused: set[str] = set()
    restarted: list[str] = []

    @web.middleware
    async def busy(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "allowWatchBookmarks" in request.query and request.path not in refused:
            refused.add(request.path)
            body = {"kind": "Status", "code": 429, "details": {"retryAfterSeconds": 86400}}
            return web.json_response(body, status=429, headers={"Retry-After": told})
        if "kopf" in request.headers.get("User-Agent", "") and "limit" in request.query:
            restarted.append(request.path)
        return await handler(request)

    app = server.app()
    app.middlewares.insert(0, busy)
    async with served_app(app, tmp_path, monkeypatch), running() as operator:
        await until(cluster, operator, lambda: server.watches == KINDS)
    assert len(refused) == len(restarted) == KINDS, (
        "the watches were asked for again, and nothing was listed anew"
    )


async def test_kopf_s_sessions_write_nothing() -> None:
    """It knows no lease, so that an operator that does not lead would write as well."""
    async with ClientSession(middlewares=(event_source.reads_only,)) as session:
        for method in ("PATCH", "POST", "PUT", "DELETE"):
            with pytest.raises(RuntimeError, match="kopf would write"):
                await session.request(method, "http://127.0.0.1:1/apis")


async def test_no_list_is_answered_at_once_and_one_that_expires_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All objects of an answer are in memory at once."""
    cluster = FakeKubernetes()
    for number in range(5):
        cluster.create(isvc_object(f"s{number}", replicas=1))
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    monkeypatch.setattr(event_source, "RESTART_PAUSE", 0.05)
    monkeypatch.setattr(event_source, "LIST_PAGE", 2)
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.expired_tokens = 1
        async with running() as operator:
            await until(cluster, operator, lambda: server.watches == KINDS and not server.expired_tokens)
            cluster.create(isvc_object("new", replicas=1))
            await until(cluster, operator, lambda: cluster.condition("Ready", "new").get("status") == "True")
    lists = [
        (path, query)
        for method, path, query, _ in server.requests
        if method == "GET"
        and path.endswith(tuple(kind.plural for kind in WATCHED))
        and "watch=true" not in query
    ]
    assert len(lists) > 2 * KINDS
    assert [each for each in lists if "limit=" not in each[1]] == []
    of_services = [query for path, query in lists if path.endswith("inferenceservices")]
    limits = [int(parse_qs(query)["limit"][0]) for query in of_services]
    assert set(limits) == {2, 2 * PAGE_GROWTH, LIST_PAGE}, "small objects are followed by more of them"


async def test_an_object_that_is_too_deep_for_python_ends_no_list_and_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes an object may set its managedFields, of which the API server takes 10,000 levels."""
    cluster = FakeKubernetes()

    def create(name: str, entries: list[dict[str, str]]) -> None:
        obj = isvc_object(name, replicas=1)
        cluster.create({**obj, "metadata": {**obj["metadata"], "managedFields": entries}})

    entries = [{"manager": "somebody", "operation": "Update", "fieldsV1": "deep"}]
    create("listed", entries)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.deep = 9_000
        async with running() as operator:
            await until(cluster, operator, lambda: server.watches == KINDS)
            create("watched", entries)
            create("other", [])
            for name in ("listed", "watched", "other"):
                await until(
                    cluster,
                    operator,
                    lambda name=name: cluster.condition("Ready", name).get("status") == "True",
                )
            assert server.watches == KINDS


async def readiness(port: int) -> tuple[int, str]:
    """Status and body of the readiness probe."""
    try:
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as response:
            return response.status, await response.text()
    except ClientError:
        return 0, ""


async def test_an_operator_whose_watches_reach_nothing_is_not_ready_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a cluster's DNS: it lists and leads, for it knows the API server's address."""
    cluster, port, nowhere = FakeKubernetes(), free_port(), f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr("argosy_operator.reconcile.lister.WATCH_PATIENCE", 1.5, raising=False)
    monkeypatch.setattr(kopf, "login_with_kubeconfig", lambda **_: kopf.ConnectionInfo(server=nowhere))
    async with served(cluster, tmp_path, monkeypatch):
        seen: list[tuple[int, str]] = []
        async with running(health_port=port) as operator:
            async with asyncio.timeout(PATIENCE):
                while not (seen and seen[-1][0] == 503 and "no watch" in seen[-1][1]):
                    assert not operator.done()
                    seen.append(await readiness(port))
                    await asyncio.sleep(0.02)
    assert 200 in [status for status, _ in seen], "it was, until it had no watch for so long"
    assert nowhere in seen[-1][1]


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://10.0.0.1:6443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:443"),
        ({}, ""),
    ],
)
def test_the_api_server_is_found_without_dns(env: dict[str, str], url: str) -> None:
    assert event_source.api_server_url(env) == url


def test_an_outage_of_any_length_is_waited_out_and_noticed_within_seconds() -> None:
    settings = kopf_settings(WATCHED)
    waits = list(itertools.islice(settings.networking.error_backoffs, 1000))
    assert len(waits) == 1000
    assert max(waits) <= 5
    assert list(itertools.islice(settings.networking.error_backoffs, 3)) == waits[:3], (
        "each request begins anew"
    )
    assert settings.process.ultimate_exiting_timeout is None, "kopf would kill the process ten minutes later"

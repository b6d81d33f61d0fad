"""The real process: kopf and `kubernetes.aio` over HTTP against the fake cluster, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import ssl
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.typedefs import Handler
from builders import CONFIG, isvc_object
from fake_http import FakeApiServer
from fake_kubernetes import FakeKubernetes
from harness import FakeFetchers, FakeRouter, http_fetch_of
from served_cluster import served, served_app, until

from argosy_operator import main
from argosy_operator.cluster import kubernetes_api, router_watch
from argosy_operator.cluster.api import ApiError
from argosy_operator.cluster.kubernetes_api import LIST_PAGE, LIST_PAGE_MAX, KubernetesApi
from argosy_operator.cluster.router_watch import http_fetch
from argosy_operator.config import OperatorConfig
from argosy_operator.main import MAX_CONNECTIONS, health_app, serve_health
from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, NAMESPACES, PODS
from argosy_operator.reconcile.controller import WATCHED, Controller
from argosy_protocol.fleet_keys import FleetKeys
from argosy_protocol.headers import internal_key
from argosy_protocol.program.list_watch import PAGE_GROWTH
from argosy_protocol.reports import ADMIN_KEY_UID, LOAD_PATH, REPORT_PATH, LoadReport, RoutableReport


async def test_from_create_to_ready_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeKubernetes()
    config = OperatorConfig(
        namespace="argosy-system", fleet_key=CONFIG.fleet_key, engine_image="engine", router_url=""
    )
    router = FakeRouter(cluster)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(router))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    async with served(cluster, tmp_path, monkeypatch) as server:
        operator = asyncio.create_task(main.run(config, health_port=0))
        try:
            await until(
                cluster,
                operator,
                lambda: (
                    server.watches == len(WATCHED)
                    and sum(path == "/api/v1/namespaces" for _, path, _, _ in server.requests) == 2
                ),
            )
            cluster.create(isvc_object(replicas=2))
            await until(cluster, operator, lambda: cluster.condition("Ready").get("status") == "True")
            cluster.edit("tiny", lambda spec: spec.update(replicas=1))
            await until(cluster, operator, lambda: len(cluster.pods()) == 1)
            cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
            await until(cluster, operator, lambda: '"services"' not in cluster.fleet())
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
    assert cluster.children() == {}
    paths = [(method, path) for method, path, _, _ in server.requests]
    assert not [path for method, path in paths if method == "GET" and "secrets" in path], (
        "Secrets are written, never read, listed or watched"
    )
    assert ("POST", "/api/v1/namespaces/team/secrets") in paths
    assert not [path for _, path in paths if "customresourcedefinitions" in path]
    assert paths.count(("GET", "/api/v1/namespaces")) == 2, "one list and one watch, of the operator's own"
    watches = {path: query for _, path, query, _ in server.requests if "watch=true" in query}
    assert len(watches) - 1 == len(WATCHED) == 6
    assert "labelSelector" in watches["/api/v1/pods"]


@pytest.mark.parametrize("part", ["LeaderElection.run", "follow_fleet_keys", "keep_fleet_key"])
async def test_an_operator_ends_with_each_of_its_parts(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its election it would never lead again, and without the others it would not notice a rotation."""

    async def fail(*_: object) -> None:
        raise TypeError(part)

    cluster = FakeKubernetes()
    monkeypatch.setattr(f"argosy_operator.main.{part}", fail)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    config = dataclasses.replace(CONFIG, lease="argosy-operator", identity="a")
    async with served(cluster, tmp_path, monkeypatch), asyncio.timeout(60):
        assert await main.run(config, health_port=0) == 1


def certified(folder: Path) -> ssl.SSLContext:
    """A server with a self-signed certificate for another name than the one it is called by."""
    files = folder / "tls.crt", folder / "tls.key"
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=llm.example.com -days 2"
    subprocess.run([*new.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    return context


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (REPORT_PATH, RoutableReport(router="r", revision=7, fleet_revision="f", replicas=())),
        (LOAD_PATH, LoadReport(router="r", revision=7)),
    ],
    ids=["routable", "load"],
)
async def test_routers_are_asked_by_address(
    path: str, sent: Any, is_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, keys = internal_key(CONFIG.fleet_key, ADMIN_KEY_UID), FleetKeys(CONFIG.fleet_key)
    queries = []

    async def report(request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {key}"
        queries.append(request.query_string)
        return web.Response(body=msgspec.json.encode(sent))

    app = web.Application()
    app.router.add_get(path, report)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=certified(tmp_path) if is_tls else None).start()
    monkeypatch.setattr(router_watch, "ROUTER_ADMIN_PORT", runner.addresses[0][1])
    try:
        async with ClientSession() as session:
            ask = partial(http_fetch, session, keys, path, type(sent), wait=25)
            assert await ask(is_tls=is_tls)("127.0.0.1", 6) == sent
            assert await ask(is_tls=is_tls)("127.0.0.1", None) == sent
            with pytest.raises((ClientError, OSError)):
                await ask(is_tls=not is_tls)("127.0.0.1", 6)
        assert queries == ["after=6&wait=25", ""]
    finally:
        await runner.cleanup()


async def test_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeKubernetes()
    async with served(cluster, tmp_path, monkeypatch), await KubernetesApi.connect() as api:
        assert await api.serves(INFERENCE_SERVICES)
        assert await api.get(DEPLOYMENTS, "team", "none") is None
        found = await api.list(PODS, namespace="team")
        assert (found.items, found.version.isdigit(), found.are_kept) == ([], True, True)
        with pytest.raises(ApiError) as caught:
            await api.patch_status(
                PODS, "team", "none", {"metadata": {"uid": "u"}, "status": {}}, strategic=True
            )
        assert caught.value.status == 404
        assert "{" not in caught.value.message, "the message of the Status, not its JSON"
        await api.delete(DEPLOYMENTS, "team", "none", uid="u")


async def test_a_list_in_pages_asks_for_one_when_the_last_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    for number in range(5):
        cluster.create(isvc_object(f"s{number}"))
    async with served(cluster, tmp_path, monkeypatch) as server, await KubernetesApi.connect() as api:
        sizes, asked = [], []
        async for page in api.list_pages(INFERENCE_SERVICES, namespace="team", limit=2):
            sizes.append(sum(1 for _ in page.items))
            asked.append(len(server.requests))
            assert page.version.isdigit()
        assert (sizes, asked) == ([2, 2, 1], [1, 2, 3])
        assert len((await api.list(INFERENCE_SERVICES, namespace=None)).items) == 5


async def test_pages_have_as_many_objects_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a request, of which a restart with 20,000 pods took 2,000."""
    cluster = FakeKubernetes()
    for number in range(1000):
        isvc = isvc_object(f"s{number:04}")
        # A tenant's objects are large in the middle of the list.
        note = {"note": "x" * (200_000 if 500 <= number < 530 else 10)}
        cluster.create({**isvc, "metadata": {**isvc["metadata"], "annotations": note}})
    async with served(cluster, tmp_path, monkeypatch) as server, await KubernetesApi.connect() as api:
        found = await api.list(INFERENCE_SERVICES, namespace=None)
        assert [each["metadata"]["name"] for each in found.items] == [f"s{n:04}" for n in range(1000)]
        limits = [int(parse_qs(query)["limit"][0]) for _, _, query, _ in server.requests]
    assert limits[:3] == [LIST_PAGE, LIST_PAGE * PAGE_GROWTH, LIST_PAGE * PAGE_GROWTH**2]
    assert max(limits) <= LIST_PAGE_MAX
    assert LIST_PAGE in limits[3:], "what is too large is asked for again in small pages"
    assert len(limits) < 25


async def test_a_page_that_is_too_large_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    sent: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        limits.append(limit := int(request.query["limit"]))
        first = int(request.query.get("continue", 0))
        numbers = range(first, min(first + limit, 100))
        more = {"resourceVersion": "7"} | ({"continue": str(numbers.stop)} if numbers.stop < 100 else {})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"metadata":%b,"items":[' % json.dumps(more).encode())
        with contextlib.suppress(ConnectionError):
            for number in numbers:
                note = "x" * (1 if number < LIST_PAGE else 3_000_000)
                obj = json.dumps({"metadata": {"name": f"p{number}", "annotations": {"note": note}}})
                await response.write(b"," * (number > first) + obj.encode())
                sent.append(number)
            await response.write(b"]}")
        return response

    app = web.Application()
    app.router.add_get("/api/v1/pods", answer)
    async with served_app(app, tmp_path, monkeypatch), await KubernetesApi.connect() as api:
        found = await api.list(PODS, namespace=None)
    assert [each["metadata"]["name"] for each in found.items] == [f"p{number}" for number in range(100)]
    assert limits == [LIST_PAGE, LIST_PAGE * PAGE_GROWTH, *[LIST_PAGE] * 9]
    assert len(sent) < sum(limits), "the second page was ended early"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"kind": "Status", "status": "Failure", "message": "no backend", "metadata": {}},
        {"metadata": {"resourceVersion": "7"}, "items": [None]},
        {"metadata": {"resourceVersion": "7"}, "items": [{"spec": {}}]},
        {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"uid": "u"}}]},
    ],
)
async def test_what_is_no_list_leaves_what_is_known(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway, or an API server that is out of order, may answer anything with 200. Taken for an empty list, routers
    lost every service."""
    cluster = FakeKubernetes()
    cluster.create(isvc_object())
    server = FakeApiServer(cluster)
    is_broken = False

    @web.middleware
    async def broken(request: web.Request, handler: Handler) -> web.StreamResponse:
        return web.json_response(answer) if is_broken and "limit" in request.query else await handler(request)

    app = server.app()
    app.middlewares.insert(0, broken)
    router = FakeRouter(cluster)
    async with served_app(app, tmp_path, monkeypatch), await KubernetesApi.connect() as api:
        controller = Controller(
            api, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
        )
        await controller.start()
        is_broken = True
        with pytest.raises(ApiError):
            await controller.resync()
        assert [obj["metadata"]["name"] for obj in controller.store.all(INFERENCE_SERVICES)] == ["tiny"]
        pages = api.list_pages(NAMESPACES, namespace=None, limit=100)
        with pytest.raises(ApiError):
            list((await anext(pages)).items)


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b'{"type": "ADDED"}', b'{"type": "ADDED", "object": {}}', b'{"object": null}']
)
async def test_what_is_no_event_is_an_error_of_the_watch(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever follows a watch tries it again after an ApiError, and ends with any other."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=line + b"\n")

    app = web.Application()
    app.router.add_get("/api/v1/namespaces", answer)
    async with served_app(app, tmp_path, monkeypatch), await KubernetesApi.connect() as api:
        with pytest.raises(ApiError):
            async for _ in api.watch(NAMESPACES, namespace=None, version="7"):
                pass


async def test_a_list_whose_token_expires_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server keeps the version of a list for some minutes only."""
    monkeypatch.setattr(kubernetes_api, "LIST_PAGE", 2)
    cluster = FakeKubernetes()
    for number in range(5):
        cluster.create(isvc_object(f"s{number}"))
    async with served(cluster, tmp_path, monkeypatch) as server, await KubernetesApi.connect() as api:
        server.expired_tokens = 2
        found = await api.list(INFERENCE_SERVICES, namespace=None)
        assert [each["metadata"]["name"] for each in found.items] == [f"s{number}" for number in range(5)]
        server.expired_tokens = 1000
        with pytest.raises(ApiError) as caught:
            await api.list(INFERENCE_SERVICES, namespace=None)
        assert caught.value.status == 410
        assert len(server.requests) < 30, "it gives up"


async def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ApiError, match="find a cluster"):
        await KubernetesApi.connect()


async def test_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeKubernetes()
    async with served(cluster, tmp_path, monkeypatch):
        api = await KubernetesApi.connect()
    async with api:
        with pytest.raises(ApiError) as caught:
            await api.get(DEPLOYMENTS, "team", "any")
        assert caught.value.status == 0


async def test_health_and_metrics(tmp_path: Path) -> None:
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    controller = Controller(
        cluster, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
    )
    runner = web.AppRunner(health_app(controller, resync_seconds=300), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ClientSession() as session:
        async with session.get(f"{url}/readyz") as response:
            assert (response.status, (await response.json())["ready"]) == (503, False)
        await controller.start()
        async with session.get(f"{url}/readyz") as response:
            assert (response.status, await response.json()) == (200, {"ready": True, "leading": True})
        async with session.get(f"{url}/healthz") as response:
            assert (response.status, (await response.json())["alive"]) == (200, True)
        controller.resynced_at -= 1000
        async with session.get(f"{url}/healthz") as response:
            assert response.status == 503
        async with session.get(f"{url}/metrics") as response:
            assert "argosy_operator_api_writes_total" in await response.text()
    await runner.cleanup()


async def test_connections_that_nobody_ends_keep_the_probes_from_nothing() -> None:
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    controller = Controller(
        cluster, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
    )
    app = health_app(controller, resync_seconds=300)
    async with serve_health(app, 0, "127.0.0.1") as port, asyncio.timeout(60):
        held = []
        for _ in range(MAX_CONNECTIONS + 10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nx: ")
            held.append((reader, writer))
        for reader, _ in held[:10]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b"", "the oldest are closed"
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as response:
            assert response.status == 200
        for _, writer in held:
            writer.close()


async def test_connections_of_one_pod_take_no_other_s_place() -> None:
    """Any pod may connect, and the oldest connection may be the kubelet's, whose probe is being answered."""
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    controller = Controller(
        cluster, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
    )
    app = health_app(controller, resync_seconds=300)
    async with serve_health(app, 0, "127.0.0.1") as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: operator\r\n")
        others = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            for _ in range(2 * MAX_CONNECTIONS)
        ]
        writer.write(b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, each in (*others, (reader, writer)):
            each.close()


async def test_answers_that_nobody_reads_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_CONNECTIONS", 4)
    answering: list[asyncio.Transport] = []
    is_answered = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        assert isinstance(request.transport, asyncio.Transport)
        answering.append(request.transport)
        is_answered.set()
        return web.Response(body=b"x" * (4 << 20))

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with serve_health(app, 0, "127.0.0.1") as port, asyncio.timeout(60):
        sockets: list[socket.socket] = []
        while len(sockets) < 12:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            await asyncio.get_running_loop().sock_sendall(sock, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
            sockets.append(sock)
            await is_answered.wait()
            is_answered.clear()
        assert sum(each.get_write_buffer_size() > 0 for each in answering) <= 4
        for sock in sockets:
            sock.close()


async def test_metrics_are_written_out_once_a_second_however_often_they_are_asked_for() -> None:
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    controller = Controller(
        cluster, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
    )
    now = 1000.0
    app = health_app(controller, resync_seconds=300, now=lambda: now)
    async with serve_health(app, 0, "127.0.0.1") as port, ClientSession() as session:

        async def asked() -> bytes:
            async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
                return await response.read()

        first = await asked()
        controller.metrics.routers.set(7)
        now += 0.9
        assert await asked() == first
        now += 0.2
        assert b"argosy_operator_routers_alive 7.0" in await asked()


def test_wrong_settings_end_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    assert main.main([]) == main.EXIT_CONFIG
    assert "ARGOSY_FLEET_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("accepted", [b"n" * 32, b"o" * 32], ids=["the new key", "the old key"])
async def test_a_router_is_asked_with_the_key_that_it_has(
    accepted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a rotation a router may have seen the new fleet key before the operator, or after it."""
    sent = RoutableReport(router="r", revision=7, fleet_revision="f", replicas=())
    wanted = f"Bearer {internal_key(accepted, ADMIN_KEY_UID)}"

    async def report(request: web.Request) -> web.Response:
        if request.headers["authorization"] != wanted:
            raise web.HTTPUnauthorized
        return web.Response(body=msgspec.json.encode(sent))

    app = web.Application()
    app.router.add_get(REPORT_PATH, report)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(router_watch, "ROUTER_ADMIN_PORT", runner.addresses[0][1])
    (tmp_path / "key").write_bytes(b"n" * 32)
    (tmp_path / "previous").write_bytes(b"o" * 32)
    try:
        async with ClientSession() as session:
            both = FleetKeys(b"", tmp_path)
            ask = partial(http_fetch, session, path=REPORT_PATH, report=RoutableReport, wait=25, is_tls=False)
            assert await ask(both)("127.0.0.1", None) == sent
            with pytest.raises(ClientError, match="401"):
                await ask(FleetKeys(b"x" * 32))("127.0.0.1", None)
    finally:
        await runner.cleanup()


async def test_requests_that_are_sent_ahead_are_not_all_answered() -> None:
    """Any pod may connect, and all of them were answered in one turn of the event loop."""
    router = FakeRouter(cluster := FakeKubernetes())
    controller = Controller(
        cluster, CONFIG, fetch=router.fetch, fetch_load=router.fetch_load, ask_progress=FakeFetchers()
    )
    app = health_app(controller, resync_seconds=300)
    async with serve_health(app, 0, "127.0.0.1") as port, asyncio.timeout(60):
        for path in ("/healthz", "/none"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() * 500)
            answers = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := await reader.read(65536):
                    answers += chunk
            assert answers.count(b"HTTP/1.1 ") == 1
            writer.close()

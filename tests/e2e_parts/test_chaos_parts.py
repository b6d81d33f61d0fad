"""The parts of `make chaos` and `make scale` that need no cluster: what judges, and what misbehaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from argosy_operator.names import DEPLOYMENTS as DEPLOYMENT_KIND
from argosy_operator.names import INFERENCE_SERVICES, Kind
from argosy_protocol.reports import with_changes
from argosy_resource.engine_command import COMPONENT_LABEL, SERVICE_LABEL
from chaos.api import TooLate, path_of, until
from chaos.fault import comparable, differences, foreign_writes
from chaos.faults.load import written_by_operator
from chaos.faulty_proxy import FaultyProxy, Write
from chaos.plane import FAST_NODES, Plane
from chaos.rig import is_settled
from chaos.router_process import Pauses
from chaos.scale import Acts, Measured
from chaos.scale_figures import (
    Figures,
    api_requests,
    histogram_quantile,
    reconcile_buckets,
    samples,
    since,
)
from chaos.simulated_nodes import BROKEN, SimulatedNodes
from chaos.simulated_router import SimulatedRouter
from cluster import control_plane
from processes import free_port

GATE = "inference.argosy.dev/routable"
DEPLOYMENTS = "/apis/apps/v1/deployments"


def test_a_control_plane_on_the_loopback_uses_the_ports_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, list[str]] = {}
    monkeypatch.setattr(
        control_plane.daemons, "start", lambda _, name, argv: started.update({name: list(map(str, argv))})
    )
    settings = Plane(tmp_path, notices_dead_nodes=True).settings
    ports = {settings.api_port, settings.etcd_client_port, settings.etcd_peer_port}
    assert len(ports) == 3
    for name in control_plane.NAMES:
        control_plane.start_one(settings, tmp_path, name)
    assert f"--secure-port={settings.api_port}" in started["apiserver"]
    assert "--bind-address=127.0.0.1" in started["apiserver"]
    assert f"--etcd-servers=http://127.0.0.1:{settings.etcd_client_port}" in started["apiserver"]
    assert f"--listen-client-urls=http://127.0.0.1:{settings.etcd_client_port}" in started["etcd"]
    assert any(flag.startswith("--audit-log-path=") for flag in started["apiserver"])
    assert set(FAST_NODES) <= set(started["controller-manager"])


def _event(verb: str, resource: str, namespace: str, *, uri: str = "/x", sub: str = "") -> str:
    target = {"resource": resource, "namespace": namespace, "name": "n", "subresource": sub}
    event = {"verb": verb, "objectRef": target, "requestURI": uri, "responseStatus": {"code": 200}}
    return json.dumps(event) + "\n"


def test_the_operators_writes_are_those_of_the_audit_log_without_dry_runs(tmp_path: Path) -> None:
    plane = Plane(tmp_path, notices_dead_nodes=False)
    assert plane.operator_writes() == []
    plane.audit_log.write_text(
        _event("patch", "pods", "a", sub="status")
        + _event("patch", "secrets", "a", uri="/x?dryRun=All")
        + _event("create", "secrets", "a")
        + _event("delete", "pods", "a").rstrip("\n")[:20]  # still being written
    )
    written = [(each["verb"], each["resource"]) for each in plane.operator_writes()]
    assert written == [("patch", "pods/status"), ("create", "secrets")]


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "is_foreign"),
    [
        ("patch", "deployments", "a", False),
        ("patch", "pods", "a", False),
        ("patch", "leases", "argosy-system", False),
        ("delete", "pods", "a", True),
        ("patch", "deployments", "b", True),
        ("patch", "nodes", "", True),
        ("patch", "inferenceservices", "a", True),
    ],
)
def test_a_write_is_foreign_by_its_kind_verb_and_namespace(
    verb: str, resource: str, namespace: str, is_foreign: bool
) -> None:
    write = {"verb": verb, "resource": resource, "namespace": namespace, "name": "n", "status": "200"}
    rig: Any = SimpleNamespace(plane=SimpleNamespace(operator_writes=lambda: [write]))
    assert bool(foreign_writes(rig, {"a", "argosy-system"})) == is_foreign


def test_end_states_of_two_runs_differ_only_by_what_matters() -> None:
    def child(namespace: str, uid: str, replicas: int) -> dict[str, Any]:
        metadata = {"namespace": namespace, "uid": uid, "resourceVersion": uid, "name": "tiny"}
        return {"metadata": metadata, "spec": {"replicas": replicas, "command": [f"{namespace}/tiny"]}}

    first = comparable(child("a", "1", 2), "a")
    assert differences(first, comparable(child("b", "2", 2), "b")) == []
    (line,) = differences(first, comparable(child("b", "2", 3), "b"))
    assert line == "spec.replicas: 2 != 3"
    assert differences({"pods": [1]}, {"pods": [1, 1]})
    assert differences({"a": 1}, {})


def _service(*, observed: int = 2, routable: int = 2, **conditions: str) -> dict[str, Any]:
    states = {"Ready": "True", "Reconciling": "False", **conditions}
    return {
        "metadata": {"generation": 2},
        "spec": {"replicas": 2},
        "status": {
            "observedGeneration": observed,
            "routableReplicas": routable,
            "conditions": [{"type": kind, "status": status} for kind, status in states.items()],
        },
    }


def test_a_service_is_settled_when_its_present_generation_is_ready() -> None:
    assert is_settled(_service())
    for unsettled in (
        _service(observed=1),
        _service(routable=1),
        _service(Ready="False"),
        _service(Reconciling="True"),
        {"metadata": {"generation": 1}, "spec": {"replicas": 2}},
    ):
        assert not is_settled(unsettled)


def test_quantiles_are_those_of_prometheus() -> None:
    metrics = {
        'argosy_operator_reconcile_seconds_bucket{le="0.1",outcome="ok"}': 90.0,
        'argosy_operator_reconcile_seconds_bucket{le="0.2",outcome="ok"}': 98.0,
        'argosy_operator_reconcile_seconds_bucket{le="+Inf",outcome="ok"}': 98.0,
        'argosy_operator_reconcile_seconds_bucket{le="0.1",outcome="defect"}': 0.0,
        'argosy_operator_reconcile_seconds_bucket{le="0.2",outcome="defect"}': 1.0,
        'argosy_operator_reconcile_seconds_bucket{le="+Inf",outcome="defect"}': 2.0,
        'argosy_operator_reconcile_seconds_count{outcome="ok"}': 98.0,
        'argosy_operator_reconcile_seconds_count{outcome="defect"}': 2.0,
    }
    buckets = reconcile_buckets(metrics)
    assert histogram_quantile(buckets, 0.45) == pytest.approx(0.05)
    assert histogram_quantile(buckets, 0.99) == pytest.approx(0.2)
    assert histogram_quantile(buckets, 0.999) == float("inf")
    assert histogram_quantile({}, 0.99) == 0.0
    figures = Figures.of(metrics, (1 << 20, 3 << 20))
    assert (figures.reconciles, figures.defects, figures.errors, figures.memory_mib) == (100.0, 2.0, 0.0, 3.0)


def test_targets_that_are_missed_are_named() -> None:
    good = Measured(
        services=200,
        replicas=5,
        converged_s=60.0,
        p50_s=0.01,
        p99_s=0.1,
        edits=40,
        edit_s=1.0,
        edit_p50_s=0.01,
        edit_p99_s=0.1,
        reconciles=1000,
        failed=1,
        defects=0,
        cpu_s=10.0,
        request_s=0.01,
        memory_mib=200.0,
        writes=3000,
        writes_at_rest=0,
        rest_s=600.0,
        load_average=1.0,
    )
    assert good.missed() == []
    bad = replace(good, p99_s=0.2, edit_p99_s=0.2, defects=1, memory_mib=256.0, writes_at_rest=1)
    assert len(bad.missed()) == 5
    assert len(bad.missed(judges_p99=False)) == 3
    assert len(replace(bad, request_s=0.019).missed()) == 5
    slow = replace(bad, request_s=0.02)
    assert len(slow.missed()) == 4, "reconciles waited for the API server; edits are judged all the same"
    assert "not judged" in slow.table()
    assert "not judged" not in bad.table()
    large = replace(good, services=1000, p99_s=0.4, edit_p99_s=0.4, memory_mib=500.0)
    assert large.missed() == [], "a larger fleet has its own targets"
    assert len(replace(large, pauses=Pauses(longest_s=0.2, held_s=0.1)).missed()) == 1
    assert replace(large, pauses=Pauses(longest_s=0.2, held_s=0.01)).missed() == []


def test_figures_of_a_time_are_differences() -> None:
    assert since({0.1: 1.0}, {0.1: 3.0, 0.2: 4.0}) == {0.1: 2.0, 0.2: 4.0}
    page = """# HELP apiserver_request_duration_seconds .
apiserver_request_duration_seconds_count{resource="pods",verb="PATCH"} 4
apiserver_request_duration_seconds_sum{resource="pods",verb="PATCH"} 2.5
apiserver_request_duration_seconds_count{resource="pods",verb="WATCH"} 7
apiserver_request_duration_seconds_sum{resource="pods",verb="WATCH"} 700
apiserver_request_duration_seconds_bucket{resource="pods",verb="PATCH",le="1"} 4
apiserver_request_total{resource="pods",verb="PATCH"} 9
"""
    assert api_requests(samples(page)) == (4.0, 2.5)


def test_a_creation_refused_because_the_object_exists_is_no_write() -> None:
    keys = {"resource": "secrets", "namespace": "a", "name": "k"}
    noted = [
        {**keys, "verb": "create", "status": "201"},
        {**keys, "verb": "create", "status": "409"},
        {**keys, "verb": "patch", "status": "409"},
        {**keys, "verb": "create", "status": "403"},
        {**keys, "verb": "update", "status": "200", "resource": "leases"},
    ]
    rig = SimpleNamespace(plane=SimpleNamespace(operator_writes=lambda: noted))
    statuses = [each["verb"] + each["status"] for each in written_by_operator(rig)]  # type: ignore[arg-type]
    assert statuses == ["create201", "patch409", "create403"]


async def test_what_does_not_come_true_is_told_with_the_last_answer() -> None:
    async def never() -> int:
        return 0

    with pytest.raises(TooLate, match="a miracle: not within 0 s; last: 0"):
        await until("a miracle", never, 0.01, interval=0.001)


def test_paths_are_those_of_the_api() -> None:
    assert path_of("pods") == "api/v1/pods"
    assert path_of("deployments", "a", "b") == "apis/apps/v1/namespaces/a/deployments/b"


def _pod(node: str | None = "sim-0", **status: Any) -> dict[str, Any]:
    container = {"name": "engine", "image": "argosy-engine:1"}
    spec = {"containers": [container], "readinessGates": [{"conditionType": GATE}]}
    if node:
        spec["nodeName"] = node
    return {"metadata": {"uid": "u", "name": "p", "namespace": "a"}, "spec": spec, "status": status}


def _statuses(wish: Any) -> dict[str, str]:
    return {each["type"]: each["status"] for each in wish["conditions"]}


def test_a_simulated_kubelet_writes_what_a_kubelet_writes() -> None:
    nodes = SimulatedNodes(None, 2, gpus=1, lease_seconds=1)  # type: ignore[arg-type]
    assert nodes.wish(_pod(node=None)) is None
    started = nodes.wish(_pod())
    assert isinstance(started, dict)
    assert started["phase"] == "Running"
    assert _statuses(started)["ContainersReady"] == "True"
    assert _statuses(started)["Ready"] == "False"  # its gate is not open
    running = {"phase": "Running", "conditions": started["conditions"]}
    assert nodes.wish(_pod(**running)) is None
    opened = _pod(phase="Running", conditions=[*started["conditions"], {"type": GATE, "status": "True"}])
    assert _statuses(nodes.wish(opened)) == {"Ready": "True"}
    ended = _pod(**running)
    ended["metadata"]["deletionTimestamp"] = "now"
    assert nodes.wish(ended) == "delete"
    nodes.kill("sim-0")
    assert nodes.wish(ended) is None
    broken = _pod("sim-1")
    broken["spec"]["containers"][0]["image"] = BROKEN
    wish = nodes.wish(broken)
    assert isinstance(wish, dict)
    assert "conditions" not in wish


@asynccontextmanager
async def _proxied() -> AsyncIterator[tuple[FaultyProxy, aiohttp.ClientSession, Callable[[str], None]]]:
    """A proxy in front of a server with one list, a watch to which lines can be sent, and writes that succeed."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    version = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal version
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write((await lines.get() + "\n").encode())
        if request.method == "GET":
            return web.json_response({"version": version})
        version += 1
        return web.json_response({}, status=201)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    proxy = FaultyProxy(f"http://127.0.0.1:{port}", None)
    await proxy.start(free_port())
    try:
        async with aiohttp.ClientSession(proxy.url) as session:
            yield proxy, session, lines.put_nowait
    finally:
        await proxy.close()
        await runner.cleanup()


async def _version(session: aiohttp.ClientSession) -> int:
    async with session.get(DEPLOYMENTS) as response:
        return int((await response.json())["version"])


async def test_simulated_nodes_that_live_say_so_again_where_the_cluster_believes_otherwise() -> None:
    reported: list[str] = []
    again = asyncio.Event()

    class Cluster:
        rounds = 0

        async def merge(self, *_: Any) -> None:
            return None

        async def list(self, resource: str) -> list[dict[str, Any]]:
            self.rounds += 1
            if self.rounds > 1:
                again.set()
            states = {"sim-0": "Unknown", "sim-1": "True", "sim-2": "Unknown"}
            return [
                {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": state}]}}
                for name, state in states.items()
            ] + [{"metadata": {"name": "foreign"}}]

        async def request(self, method: str, path: str, *_: Any, **__: Any) -> None:
            reported.append(path)

    nodes = SimulatedNodes(Cluster(), 3, gpus=1, lease_seconds=0)  # type: ignore[arg-type]
    nodes.kill("sim-2")
    renewing = asyncio.create_task(nodes.renew_leases())
    async with asyncio.timeout(30):
        await again.wait()
    renewing.cancel()
    assert set(reported) == {"api/v1/nodes/sim-0/status"}


async def test_the_proxy_tells_of_writes_before_their_author_learns_of_them() -> None:
    async with _proxied() as (proxy, session, _):
        seen: list[Write] = []
        proxy.on_write = seen.append
        async with session.post(DEPLOYMENTS, json={}) as response:
            assert response.status == 201
            assert seen == [Write("POST", DEPLOYMENTS, 201)]
        async with session.post(DEPLOYMENTS, params={"dryRun": "All"}, json={}):
            assert len(seen) == 1
        await _version(session)
        assert proxy.writes == seen
        assert not seen[0].is_lease
        assert Write("PUT", "/apis/coordination.k8s.io/v1/namespaces/a/leases/b", 200).is_lease


@pytest.mark.parametrize("mode", ["refused", "unavailable"])
async def test_a_proxy_that_fails_does_so_until_it_is_healed(mode: Any) -> None:
    async with _proxied() as (proxy, session, _):
        proxy.mode = mode
        try:
            async with session.get(DEPLOYMENTS) as response:
                assert response.status == 503
        except aiohttp.ClientError:
            assert mode == "refused"
        assert proxy.failed >= 1
        proxy.heal()
        assert await _version(session) == 0


async def test_a_silent_proxy_answers_nothing() -> None:
    async with _proxied() as (proxy, session, _):
        proxy.mode = "silent"
        with pytest.raises(TimeoutError):
            async with session.get(DEPLOYMENTS, timeout=aiohttp.ClientTimeout(total=0.3)):
                pass


async def test_stale_lists_are_those_that_were_remembered() -> None:
    async with _proxied() as (proxy, session, _):
        await _version(session)
        earlier = proxy.remember_lists()
        async with session.post(DEPLOYMENTS, json={}):
            pass
        assert await _version(session) == 1
        proxy.stale = earlier
        assert await _version(session) == 0
        proxy.stale = None
        assert await _version(session) == 1


async def test_watches_expire_lose_deletions_and_are_cut() -> None:
    async with _proxied() as (proxy, session, send):
        proxy.expired_watches = 1
        async with session.get(DEPLOYMENTS, params={"watch": "true"}) as response:
            assert response.status == 410
        proxy.lose_deletions = True
        async with session.get(DEPLOYMENTS, params={"watch": "true"}) as response:
            send('{"type":"DELETED","object":{}}')
            send('{"type":"ADDED","object":{}}')
            assert json.loads(await response.content.readline())["type"] == "ADDED"
            assert proxy.lost == 1
            assert proxy.watches == 1
            assert proxy.cut_watches() == 1
            with pytest.raises(aiohttp.ClientError):
                await response.content.readline()


def test_an_edits_time_ends_with_the_change_of_its_deployment() -> None:
    obj = {"metadata": {"namespace": "team", "name": "s", "generation": 1}}
    acts = Acts([(INFERENCE_SERVICES, obj), (DEPLOYMENT_KIND, obj)])

    def change(kind: Kind, name: str, generation: int) -> None:
        labels = {SERVICE_LABEL: name}
        metadata = {"namespace": "team", "name": name, "labels": labels, "generation": generation}
        acts.note(kind, "MODIFIED", {"metadata": metadata})

    change(DEPLOYMENT_KIND, "s", 1)  # nobody has edited it
    change(INFERENCE_SERVICES, "s", 1)  # its status
    assert acts.seconds == []
    change(INFERENCE_SERVICES, "s", 2)
    change(DEPLOYMENT_KIND, "other", 2)
    assert acts.seconds == []
    change(DEPLOYMENT_KIND, "s", 2)
    change(DEPLOYMENT_KIND, "s", 3)
    assert len(acts.seconds) == 1


class _Nodes:
    """What a simulated router knows of nodes."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.changed = asyncio.Event()

    def run(self, service: str, name: str) -> None:
        labels = {COMPONENT_LABEL: "engine", SERVICE_LABEL: service}
        metadata = {"namespace": "team", "name": name, "uid": name, "labels": labels}
        ready = {"type": "ContainersReady", "status": "True"}
        self.pods.append({"metadata": metadata, "status": {"podIP": "127.84.0.1", "conditions": [ready]}})
        self.changed.set()


async def test_a_simulated_router_tells_whoever_knows_it_what_has_changed() -> None:
    nodes: Any = _Nodes()
    router: Any = SimulatedRouter(None, nodes, "argosy-system")  # type: ignore[arg-type]
    following = asyncio.create_task(router.follow())
    nodes.run("a", "a-0")
    nodes.run("b", "b-0")
    await until("both", lambda: asyncio.sleep(0, router.revision == 2), 10)
    whole = router.report(-1, "")
    nodes.run("a", "a-1")
    await until("the third", lambda: asyncio.sleep(0, router.revision == 3), 10)
    changes = router.report(whole.revision, whole.epoch)
    assert changes.base == whole.revision
    assert changes.services == ("team/a",)
    merged = with_changes(whole, changes)
    assert merged is not None
    assert sorted(each.name for each in merged.replicas) == ["a-0", "a-1", "b-0"]
    assert router.report(whole.revision, "another").base is None
    following.cancel()

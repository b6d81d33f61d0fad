"""Watches that are refused: the real process over HTTP, in real time."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import CONFIG, isvc_object
from fake_kubernetes import FakeKubernetes
from harness import FakeRouter, http_fetch_of
from served_cluster import served, until

from argosy_operator import main
from argosy_operator.config import OperatorConfig
from argosy_operator.kinds import INFERENCE_SERVICES
from argosy_operator.process import event_source
from argosy_operator.process.event_source import EndlessBackoff, kopf_settings
from argosy_operator.reconcile import controller
from argosy_operator.reconcile.controller import WATCHED

KINDS = len(WATCHED)


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
    config = OperatorConfig(
        namespace="argosy-system", fleet_key=CONFIG.fleet_key, engine_image="engine", router_url=""
    )
    router = FakeRouter(cluster)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(router))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    monkeypatch.setattr(event_source, "RESTART_PAUSE", 0.05)
    monkeypatch.setattr(event_source, "EndlessBackoff", Hasty)
    monkeypatch.setattr(controller, "RELIST_PAUSE", 0.05)
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.watch_errors = list(statuses)
        operator = asyncio.create_task(main.run(config, health_port=0))
        try:
            await until(cluster, operator, lambda: not server.watch_errors and server.watches == KINDS)
            # What changes now is known by the watches alone: no resync is due for minutes.
            cluster.create(isvc_object(replicas=1))
            await until(cluster, operator, lambda: cluster.condition("Ready").get("status") == "True")
            cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
            await until(cluster, operator, lambda: '"services"' not in cluster.fleet())
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
            # kopf retrieves no exception of a watch. asyncio reports one when the task is collected, with a traceback,
            # for which Python parses source: an `ast.parse` in which the collector begins would fail then.
            gc.collect()


async def test_no_list_is_answered_at_once_and_one_that_expires_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All objects of an answer are in memory at once."""
    cluster = FakeKubernetes()
    for number in range(5):
        cluster.create(isvc_object(f"s{number}", replicas=1))
    config = OperatorConfig(
        namespace="argosy-system", fleet_key=CONFIG.fleet_key, engine_image="engine", router_url=""
    )
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr("argosy_operator.cluster.router_watch.GRACE", 0.2)
    monkeypatch.setattr(event_source, "RESTART_PAUSE", 0.05)
    monkeypatch.setattr(event_source, "LIST_PAGE", 2)
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.expired_tokens = 1
        operator = asyncio.create_task(main.run(config, health_port=0))
        try:
            await until(cluster, operator, lambda: server.watches == KINDS and not server.expired_tokens)
            cluster.create(isvc_object("new", replicas=1))
            await until(cluster, operator, lambda: cluster.condition("Ready", "new").get("status") == "True")
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
            gc.collect()
    lists = [
        (path, query)
        for method, path, query, _ in server.requests
        if method == "GET"
        and path.endswith(tuple(kind.plural for kind in WATCHED))
        and "watch=true" not in query
    ]
    assert len(lists) > 2 * KINDS
    assert [each for each in lists if "limit=" not in each[1]] == []


def test_an_outage_of_any_length_is_waited_out_and_noticed_within_seconds() -> None:
    settings = kopf_settings(WATCHED)
    waits = list(itertools.islice(settings.networking.error_backoffs, 1000))
    assert len(waits) == 1000
    assert max(waits) <= 5
    assert list(itertools.islice(settings.networking.error_backoffs, 3)) == waits[:3], (
        "each request begins anew"
    )
    assert settings.process.ultimate_exiting_timeout is None, "kopf would kill the process ten minutes later"

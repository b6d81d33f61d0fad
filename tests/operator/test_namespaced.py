"""The operator with `watchNamespaces`: the real process under the permissions that the chart gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import CONFIG, autoscaler, isvc_object
from chart_rules import fleet_rules, helper_rules
from fake_http import FakeApiServer
from fake_kubernetes import FakeKubernetes
from harness import ROUTER_POD, FakeRouter, http_fetch_of
from served_cluster import served, until

from argosy_operator import main
from argosy_operator.cluster.kubernetes_api import KubernetesApi
from argosy_operator.config import OperatorConfig
from argosy_operator.names import AUTOSCALERS, LEASES, UNREADABLE_ANNOTATION, Kind
from argosy_operator.reconcile import lister
from argosy_operator.reconcile.controller import WATCHED

Rules = list[dict[str, Any]]


def permissions(roles: Mapping[str, Rules]) -> Callable[..., bool]:
    """RBAC with one Role in each of some namespaces, and nothing for the whole cluster."""

    def allows(verb: str, kind: Kind, resource: str, namespace: str | None, name: str | None) -> bool:
        return namespace is not None and any(
            kind.group in rule["apiGroups"]
            and resource in rule["resources"]
            and verb in rule["verbs"]
            and ("resourceNames" not in rule or name in rule["resourceNames"])
            for rule in roles.get(namespace, ())
        )

    return allows


def watches(server: FakeApiServer) -> list[str]:
    return sorted({path for _, path, query, _ in server.requests if "watch=true" in query})


OWN = "argosy-system"


def config_of(*namespaces: str) -> OperatorConfig:
    return OperatorConfig(
        namespace=OWN,
        fleet_key=CONFIG.fleet_key,
        engine_image="engine",
        router_url="http://router",
        watch_namespaces=namespaces,
        lease="argosy-operator",
        identity="argosy-operator-0",
    )


def roles_in(*namespaces: str) -> dict[str, Rules]:
    """The chart's Roles, by their namespaces."""
    roles: dict[str, Rules] = {OWN: fleet_rules("argosy-operator-fleet")}
    for namespace in namespaces:
        roles[namespace] = [*roles.get(namespace, ()), *helper_rules("argosy.operatorRules")]
    return roles


@pytest.mark.parametrize("other", ["other", OWN], ids=["two tenants", "its own namespace among them"])
async def test_the_roles_of_the_chart_are_enough(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(router))
    config = config_of("team", other)
    roles = roles_in("team", other)
    async with served(cluster, tmp_path, monkeypatch) as server:
        server.authorize = permissions(roles)
        operator = asyncio.create_task(main.run(config, health_port=0))
        try:
            cluster.create(isvc_object(scaling={"maxReplicas": 2, "metrics": {"concurrency": 10}}))
            cluster.create(isvc_object("second", namespace=other))
            cluster.create(isvc_object("foreign", namespace="elsewhere"))
            await until(
                cluster, operator, lambda: all(cluster.pods(namespace=each) for each in ("team", other))
            )
            await until(cluster, operator, lambda: f"/api/v1/namespaces/{OWN}/pods" in watches(server))
            cluster.create(ROUTER_POD)
            await until(cluster, operator, lambda: cluster.condition("Ready").get("status") == "True")
            autoscalers = f"/apis/autoscaling/v2/namespaces/team/{AUTOSCALERS.plural}"
            await until(cluster, operator, lambda: autoscalers in watches(server))
            cluster.create(autoscaler())
            await until(cluster, operator, lambda: cluster.condition("Degraded")["reason"] == "ScaledTwice")
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
    assert server.forbidden == []
    assert cluster.objects[LEASES, OWN, "argosy-operator"]["spec"]["holderIdentity"] == "", (
        "given up at its end"
    )
    assert cluster.children(namespace="elsewhere") == {}
    in_own = [path for path in watches(server) if f"/{OWN}/" in path]
    assert in_own == [f"/api/v1/namespaces/{OWN}/pods"] or other == OWN


async def test_a_namespace_without_its_role_stops_no_other_and_is_asked_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(FakeRouter(cluster)))
    monkeypatch.setattr(lister, "RETRY", 0.2)
    async with served(cluster, tmp_path, monkeypatch) as server:
        roles = roles_in("team", "other")
        server.authorize = permissions(roles)
        operator = asyncio.create_task(main.run(config_of("gone", "team", "other"), health_port=0))

        def is_ready(name: str, namespace: str) -> bool:
            return cluster.condition("Ready", name, namespace=namespace).get("status") == "True"

        def leases() -> list[str]:
            return [
                str(obj["metadata"].get("annotations", {}).get(UNREADABLE_ANNOTATION))
                for (kind, _, _), obj in cluster.objects.items()
                if kind is LEASES
            ]

        try:
            cluster.create(ROUTER_POD)
            cluster.create(isvc_object("small", namespace="other"))
            cluster.create(isvc_object("waits", namespace="gone"))
            await until(cluster, operator, lambda: is_ready("small", "other"))
            await until(cluster, operator, lambda: leases() == ['{"gone": "Forbidden"}'])
            assert not [each for each in server.forbidden if each.startswith("watch")]
            assert not [each for each in server.forbidden if "event" in each], "it may post Events of its own"

            roles["gone"] = roles["team"]
            await until(cluster, operator, lambda: is_ready("waits", "gone"))
            await until(cluster, operator, lambda: len(watches(server)) >= 3 * len(WATCHED) + 1)

            del roles["other"]
            server.forbidden.clear()
            server.cut_watches()
            await until(cluster, operator, lambda: leases() == ['{"other": "Forbidden"}'])
            cluster.create(isvc_object("new"))
            await until(cluster, operator, lambda: is_ready("new", "team"))
            assert {each.rpartition(" ")[2] for each in server.forbidden} == {"other"}
            refused = [each for each in server.forbidden if each.startswith("watch")]
            assert len(refused) <= 3 * len(WATCHED), "no watch goes on asking"
        finally:
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)


@pytest.mark.parametrize("may_ask", [True, False])
async def test_a_namespace_is_gone_if_the_api_server_says_so(
    may_ask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        served(FakeKubernetes(), tmp_path, monkeypatch) as server,
        await KubernetesApi.connect() as api,
    ):
        server.missing_namespaces = {"gone"}
        server.authorize = lambda *_: may_ask
        assert await api.has_namespace("gone") is (False if may_ask else None)
        assert await api.has_namespace("team") is (True if may_ask else None)
        assert await api.has_namespace("a/b/c/d/e") is None, "an answer of something else"

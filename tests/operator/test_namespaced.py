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
from argosy_operator.config import OperatorConfig
from argosy_operator.kinds import AUTOSCALERS, LEASES, Kind

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


@pytest.mark.parametrize("other", ["other", OWN], ids=["two tenants", "its own namespace among them"])
async def test_the_roles_of_the_chart_are_enough(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeKubernetes()
    router = FakeRouter(cluster)
    monkeypatch.setattr(main, "http_fetch", http_fetch_of(router))
    config = OperatorConfig(
        namespace=OWN,
        fleet_key=CONFIG.fleet_key,
        engine_image="engine",
        router_url="http://router",
        watch_namespaces=("team", other),
        lease="argosy-operator",
        identity="argosy-operator-0",
    )
    roles: dict[str, Rules] = {OWN: fleet_rules("argosy-operator-fleet")}
    for namespace in ("team", other):
        roles[namespace] = [*roles.get(namespace, ()), *helper_rules("argosy.operatorRules")]
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

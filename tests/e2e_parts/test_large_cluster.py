"""The Kubernetes in memory on which `make scale --in-memory` measures."""

from __future__ import annotations

from typing import Any

from argosy_operator.names import PODS
from argosy_resource.engine_command import SERVICE_LABEL
from chaos.large_cluster import LargeCluster

GATE = "inference.argosy.dev/routable"


def _deployment(replicas: int) -> dict[str, Any]:
    gates = [{"conditionType": GATE}]
    pod = {"containers": [{"name": "engine", "image": "i"}], "readinessGates": gates}
    template = {"metadata": {"labels": {"app": "s"}}, "spec": pod}
    metadata = {"name": "s", "namespace": "team", "labels": {SERVICE_LABEL: "s"}}
    spec = {"replicas": replicas, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def test_a_large_cluster_runs_the_pods_of_its_deployments_and_then_rests() -> None:
    cluster = LargeCluster()
    cluster.create(_deployment(2))
    key = next(iter(cluster.objects))
    while cluster.step():
        pass
    ready = [{each["type"]: each["status"] for each in pod["status"]["conditions"]} for pod in cluster.pods()]
    assert [(each["ContainersReady"], "Ready" in each) for each in ready] == [("True", False)] * 2, "the gate"
    for pod in cluster.pods():
        gate = {"type": GATE, "status": "True"}
        status = {**pod["status"], "conditions": [*pod["status"]["conditions"], gate]}
        cluster.overwrite((PODS, "team", pod["metadata"]["name"]), {**pod, "status": status})
    while cluster.step():
        pass
    assert cluster.objects[key]["status"]["readyReplicas"] == 2
    for replicas in (3, 1):
        live = cluster.objects[key]
        cluster.overwrite(key, {**live, "spec": {**live["spec"], "replicas": replicas}})
        while cluster.step():
            pass
        assert len(cluster.pods()) == replicas
    version = max(int(each["metadata"]["resourceVersion"]) for each in cluster.objects.values())
    assert not cluster.step()
    assert version == max(int(each["metadata"]["resourceVersion"]) for each in cluster.objects.values())

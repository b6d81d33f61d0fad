"""Replicas are added and removed: which ones go, to zero and back, and an operator that dies over it; odd pods.

No faults of Kubernetes, but what only its own controllers and admission can show: that a ReplicaSet follows the
operator's marks, that a Deployment without pods comes back, and that no default of the API server looks like a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from argosy_operator.cluster.router_watch import ASK_PAUSE
from argosy_protocol.reports import ReplicaLoadReport, ServiceLoadReport
from chaos.api import Object, until
from chaos.fault import Fault, require, uids
from chaos.faults.load import writes_at_rest
from chaos.rig import PATIENCE, Rig, condition

APPLY = "apply-patch+yaml"
COST = "controller.kubernetes.io/pod-deletion-cost"
NAME = "tiny"


def _load(
    namespace: str,
    pods: Iterable[Object] = (),
    *,
    values: dict[str, float] | None = None,
    sequences: int = 0,
    held: int = 0,
    idle_s: float = 0.0,
) -> ServiceLoadReport:
    """A router's report: `sequences` at each pod, and what each cache is worth, by the pod's UID."""
    replicas = tuple(
        ReplicaLoadReport(
            name=pod["metadata"]["name"],
            uid=pod["metadata"]["uid"],
            routable=True,
            requests=sequences,
            cache_value=(values or {}).get(pod["metadata"]["uid"], 0.0),
        )
        for pod in pods
    )
    return ServiceLoadReport(
        service=f"{namespace}/{NAME}", held=held, queued=held, idle_s=idle_s, replicas=replicas
    )


async def _shrunk(rig: Rig, namespace: str, count: int) -> list[Object]:
    """The replicas, once there are so many."""

    async def probe() -> list[Object] | None:
        found = await rig.pods(namespace, NAME)
        return found if len(found) == count else None

    return await until(f"{count} replicas", probe, PATIENCE)


def _ages(pods: Iterable[Object]) -> list[Object]:
    """Oldest first. Without a mark a ReplicaSet gives up the newest, or any of those that are about as old."""
    return sorted(
        pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], int(pod["metadata"]["resourceVersion"]))
    )


async def _by_caches(rig: Rig, namespace: str) -> str:
    await rig.apply(namespace, replicas=6)
    await rig.ready(namespace)
    pods = _ages(await rig.pods(namespace, NAME))
    values = {pod["metadata"]["uid"]: 1000.0 - 100 * rank for rank, pod in enumerate(reversed(pods))}
    await rig.router.report_load(_load(namespace, pods, values=values))
    before = len(rig.plane.operator_writes())
    await rig.edit(namespace, NAME, replicas=3)
    left = await _shrunk(rig, namespace, 3)
    require(uids(left) == uids(pods[3:]), "a replica whose cache was worth more has gone")
    marked = [pod["metadata"]["name"] for pod in left if COST in pod["metadata"].get("annotations", {})]
    require(not marked, f"survivors are marked: {marked}")
    written = [each for each in rig.plane.operator_writes()[before:] if each["resource"] == "pods"]
    require(len(written) == 3, f"{len(written)} pods were written for 3 that go")
    await rig.ready(namespace)
    # Another one is worth least now.
    values = {pod["metadata"]["uid"]: 10.0 * (rank != 1) for rank, pod in enumerate(_ages(left))}
    await rig.router.report_load(_load(namespace, left, values=values))
    await asyncio.sleep(ASK_PAUSE)  # the operator has asked for loads just now, and does not ask again before
    await rig.edit(namespace, NAME, replicas=2)
    last = await _shrunk(rig, namespace, 2)
    require(uids(last) == {uid for uid, value in values.items() if value}, "a replica worth more went second")
    return "of 6 the 3 oldest went, and of 3 the middle one, as the caches' values said; 1 write for each"


async def _to_zero(rig: Rig, namespace: str) -> str:
    loop = asyncio.get_running_loop()
    scaling = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 10, "metrics": {"concurrency": 8}}
    await rig.apply(namespace, replicas=1, scaling=scaling)
    await rig.ready(namespace)
    await rig.router.report_load(_load(namespace, await rig.pods(namespace), idle_s=60.0))
    began = loop.time()
    await rig.wait_for(
        "scaled to zero",
        namespace,
        NAME,
        lambda obj: condition(obj, "Ready").get("reason") == "ScaledToZero",
    )
    idle = loop.time() - began
    require(not await rig.pods(namespace), "a replica is left at zero")
    await rig.router.report_load(_load(namespace, idle_s=90.0))
    await rig.idle()
    for _ in range(2):
        await rig.operator.kill()  # what it knew of the service's past is gone
        await rig.start_operator()
        await rig.idle()
        await asyncio.sleep(6)  # one load report
    deployment = await rig.api.get("deployments", namespace, f"{NAME}-engine")
    require(deployment["spec"]["replicas"] == 0, "a new operator started a replica that nobody asked for")
    began = loop.time()
    await rig.router.report_load(_load(namespace, held=3))

    async def wanted() -> bool:
        found = await rig.api.get("deployments", namespace, f"{NAME}-engine")
        return found["spec"]["replicas"] > 0

    await until("a replica to be wanted", wanted, PATIENCE)
    noticed = loop.time() - began
    served = await rig.wait_for(
        "served again", namespace, NAME, lambda obj: obj["status"].get("routableReplicas", 0) == 1
    )
    woken = loop.time() - began
    await rig.router.report_load(_load(namespace, await rig.pods(namespace), sequences=3))
    require(noticed < 5.0, f"{noticed:.1f} s until a held request had a replica created")
    seconds = served["status"]["scaling"]["coldStartSeconds"]
    return (
        f"no replica {idle:.0f} s after the report; a held request had one created within {noticed:.1f} s, and used "
        f"within {woken:.1f} s; cold start told: {seconds} s"
    )


ODD_PODS: dict[str, Object] = {
    "claims": {
        "resources": {
            "claims": [
                {"name": "gpu", "resourceClaimTemplateName": "a100", "request": "one"},
                {"name": "nic", "resourceClaimName": "shared"},
            ]
        }
    },
    "slice": {"resources": {"gpu": {"resourceName": "nvidia.com/mig-1g.10gb"}}},
    "guaranteed": {
        "model": {"source": "hf://org/name"},
        "resources": {"cpu": 4, "cpuLimit": "4000m", "memory": "1.5Gi", "sharedMemory": 2000000000},
    },
    "limit-only": {"resources": {"cpuLimit": "1500m"}},
    "placed": {
        "placement": {
            "runtimeClassName": "odd",
            "schedulerName": "nobody",
            "priorityClassName": "odd",
            "topologySpreadConstraints": [
                {
                    "topologyKey": "zone",
                    "minDomains": 2,
                    "matchLabelKeys": ["pod-template-hash"],
                    "nodeTaintsPolicy": "Honor",
                },
                {"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}},
            ],
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "podAffinityTerm": {"topologyKey": "host", "namespaceSelector": {}}}
                    ]
                }
            },
        }
    },
    "vllm": {
        "model": {"source": "hf://org/name"},
        "engine": {"type": "vllm", "args": ["--enforce-eager"]},
        "parallelism": {"tensor": 2},
        "resources": {"gpu": {}},
    },
    "sglang": {"model": {"source": "hf://org/name"}, "engine": {"type": "sglang", "maxModelLen": 4096}},
    "several-nodes": {"engine": {"device": "cpu"}, "parallelism": {"tensor": 2, "nodes": 2}},
}
"""Pods that are unlike the others: what an API server makes of their fields must not look like a change."""


async def _odd_pods(rig: Rig, namespace: str) -> str:
    for kind, path, extra in (
        ("RuntimeClass", "apis/node.k8s.io/v1/runtimeclasses", {"handler": "odd"}),
        ("PriorityClass", "apis/scheduling.k8s.io/v1/priorityclasses", {"value": 5}),
    ):
        version = path.removeprefix("apis/").rpartition("/")[0]
        obj = {"apiVersion": version, "kind": kind, "metadata": {"name": "odd"}, **extra}
        await rig.api.request("PATCH", f"{path}/odd?fieldManager=admin&force=true", obj, content=APPLY)
    for name, spec in ODD_PODS.items():
        await rig.apply(namespace, name, **{"replicas": 1, **spec})

    async def created() -> dict[str, Object] | None:
        found = {}
        for name in ODD_PODS:
            pods = await rig.pods(namespace, name)
            if not pods:
                return None
            found[name] = pods[0]
        return found

    pods = await until("a pod of each service", created, PATIENCE)
    quality = pods["guaranteed"]["status"]["qosClass"]
    require(quality == "Guaranteed", f"the pod is {quality}")
    require(pods["placed"]["spec"]["priority"] == 5, "the priority class was not used")
    written = await writes_at_rest(rig, 10)
    require(not written, f"writes at rest: {written[:3]}")
    revisions = await rig.api.list("replicasets", namespace)
    require(len(revisions) == len(ODD_PODS), f"{len(revisions)} templates for {len(ODD_PODS)} services")
    return f"{len(ODD_PODS)} services have pods, the guaranteed one is {quality}; no write in 10 s, no second template"


async def _load_and_death(rig: Rig, namespace: str) -> str:
    down = {"stabilizationWindowSeconds": 10, "periodSeconds": 2}
    scaling = {"maxReplicas": 4, "metrics": {"concurrency": 4}, "scaleDown": down}
    await rig.apply(namespace, replicas=1, scaling=scaling)
    await rig.ready(namespace)
    await rig.router.report_load(_load(namespace, await rig.pods(namespace), sequences=15))
    found = await rig.wait_for(
        "scaled up", namespace, NAME, lambda obj: obj["status"].get("routableReplicas") == 4
    )
    require(found["spec"]["replicas"] == 1, "spec.replicas was written")
    require(found["status"]["scaling"]["reason"] == "Concurrency", f"reason {found['status']['scaling']}")
    pods = await rig.pods(namespace)
    await rig.operator.kill()
    await rig.start_operator()
    await rig.router.report_load(_load(namespace, pods, sequences=4))
    await rig.idle()
    await asyncio.sleep(12)
    require(uids(await rig.pods(namespace)) == uids(pods), "a new operator changed the number")
    oldest = _ages(pods)
    values = {pod["metadata"]["uid"]: float(rank) for rank, pod in enumerate(oldest)}
    await rig.router.report_load(_load(namespace, pods, sequences=1, values=values))
    left = await _shrunk(rig, namespace, 1)
    require(uids(left) == uids(oldest[3:]), "the replica whose cache was worth most has gone")
    await rig.router.report_load(_load(namespace, left, sequences=1))
    return "1 to 4 replicas by load; a new operator kept them; back to 1, the one with the best cache"


FAULTS = (
    Fault(
        "scale-down by caches",
        "The replicas that go are those whose caches the routers value least, and no other pod is written",
        _by_caches,
        300,
    ),
    Fault(
        "scale to zero, operator killed",
        "An idle service has no replica, a new operator starts none by itself, and a held request has one created",
        _to_zero,
        400,
    ),
    Fault(
        "scaling by load, operator killed",
        "A new operator keeps the number, and removes replicas one by one once the load has asked for fewer",
        _load_and_death,
        400,
    ),
    Fault(
        "pods of every kind",
        "DRA claims, a GPU's slice, Guaranteed, placement, vLLM, SGLang and several nodes are admitted, and cause no "
        "write at rest",
        _odd_pods,
        300,
    ),
)

"""HorizontalPodAutoscalers of other people, as they show in a cluster: their status, their writes, lists of them."""

from __future__ import annotations

from typing import Any

import msgspec
from fake_kubernetes import FakeKubernetes
from harness import ROUTER_POD, Operator, deployment

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.names import AUTOSCALERS, Kind

SCALING: dict[str, Any] = {"maxReplicas": 4, "metrics": {"concurrency": 10}}


def hpa_status(able: str, active: str = "", limited: str = "", **more: Any) -> dict[str, Any]:
    """A status as the controller of Kubernetes writes it: the reasons of its conditions."""
    reasons = {"AbleToScale": able, "ScalingActive": active, "ScalingLimited": limited}
    true = ("SucceededGetScale", "ReadyForNewScale", "SucceededRescale", "ValidMetricFound", "ScaleUpLimit")
    conditions = [
        {"type": name, "status": str(reason in true), "reason": reason}
        for name, reason in reasons.items()
        if reason
    ]
    return {"conditions": conditions, **more}


NO_METRICS = hpa_status("SucceededGetScale", "FailedGetResourceMetric")
NO_SCALE = hpa_status("FailedGetScale")
DISABLED = hpa_status("SucceededGetScale", "ScalingDisabled")
AT_TARGET = hpa_status("ReadyForNewScale", "ValidMetricFound", "DesiredWithinRange")
AT_A_BOUND = hpa_status("SucceededRescale", lastScaleTime="2026-01-01T00:00:00Z")
LIMITED = hpa_status(
    "SucceededRescale", "ValidMetricFound", "ScaleUpLimit", lastScaleTime="2026-01-01T00:00:00Z"
)
SYNCED = hpa_status(
    "SucceededRescale", "ValidMetricFound", "DesiredWithinRange", lastScaleTime="2026-01-01T00:00:00Z"
)
KEY = (AUTOSCALERS, "team", "hpa")


def sync(cluster: FakeKubernetes, replicas: int) -> None:
    """What the autoscaler's controller does: writes the scale, then its own status."""
    cluster.edit("tiny", lambda spec: spec.update(replicas=replicas))
    cluster.overwrite(KEY, {**cluster.objects[KEY], "status": SYNCED})


def replicas(cluster: FakeKubernetes) -> int:
    number: int = deployment(cluster)["spec"]["replicas"]
    return number


def set_sequences(operator: Operator, sequences: int) -> None:
    """What the router reports of each replica."""
    router = operator.router
    router.load = msgspec.structs.replace(router.load, held=0, queued=0, idle_s=0.0)
    router.each = msgspec.structs.replace(router.each, requests=sequences)


class Counting(FakeKubernetes):
    """Counts the lists of autoscalers, and refuses them if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = 0
        self.refusal = 0
        self.create(ROUTER_POD)

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        if kind is AUTOSCALERS:
            self.lists += 1
            if self.refusal:
                raise ApiError("LIST", self.refusal, "no")
        return await super().list(kind, namespace=namespace, labels=labels)

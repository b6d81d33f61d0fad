"""Resources, namespaces and the CRD are deleted while no operator looks: R11."""

from __future__ import annotations

import asyncio

from chaos.api import until
from chaos.fault import Fault, is_gone, require
from chaos.faults.operator_dies import RETURN_S
from chaos.operator_process import install
from chaos.rig import PATIENCE, Rig

CRD = "inferenceservices.inference.argosy.dev"


async def _ready_without_operator(rig: Rig, namespace: str, *names: str) -> None:
    """Services become Ready; then the operator is killed."""
    for name in names:
        await rig.apply(namespace, name)
    for name in names:
        await rig.ready(namespace, name)
    await rig.operator.kill()


async def _forgotten(rig: Rig, namespace: str) -> float:
    """Start the operator; seconds until the routers' document has no service of the namespace."""
    await rig.start_operator()
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def forgotten() -> bool:
        return not any(name.startswith(f"{namespace}/") for name in await rig.fleet())

    await until("the fleet document to forget the services", forgotten, PATIENCE)
    took = loop.time() - began
    require(took <= RETURN_S, f"{took:.1f} s until the services were forgotten")
    return took


async def _namespace(rig: Rig, namespace: str) -> str:
    await _ready_without_operator(rig, namespace, "one", "two")
    loop = asyncio.get_running_loop()
    began = loop.time()
    await rig.delete_namespace(namespace)
    gone = loop.time() - began
    took = await _forgotten(rig, namespace)
    return f"namespace gone in {gone:.1f} s without an operator; forgotten {took:.1f} s after its return"


async def _resource(rig: Rig, namespace: str) -> str:
    await _ready_without_operator(rig, namespace, "tiny")
    await rig.api.delete("inferenceservices", namespace, "tiny")

    async def gone() -> bool:
        kinds = ("inferenceservices", "deployments", "services", "poddisruptionbudgets", "secrets", "pods")
        return all([await is_gone(rig, kind, namespace) for kind in kinds])

    await until("the service and its children to be gone", gone, PATIENCE)
    took = await _forgotten(rig, namespace)
    return f"forgotten {took:.1f} s after the operator's return"


async def _is_collected(rig: Rig, namespace: str) -> None:
    """Wait until Kubernetes' garbage collector follows InferenceServices: it looks for new kinds every 30 s, and keeps
    the children of owners whose kind has come and gone in between."""
    await rig.apply(namespace, "first")
    await rig.ready(namespace, "first")
    await rig.api.delete("inferenceservices", namespace, "first")

    async def gone() -> bool:
        return await is_gone(rig, "deployments", namespace) and await is_gone(rig, "pods", namespace)

    await until("the children of a deleted service to be gone", gone, PATIENCE)


async def _crd(rig: Rig, namespace: str) -> str:
    await _is_collected(rig, namespace)
    await _ready_without_operator(rig, namespace, "tiny")
    await rig.api.delete("customresourcedefinitions", "", CRD)

    async def gone() -> bool:
        return await rig.api.find("customresourcedefinitions", "", CRD) is None and await is_gone(
            rig, "pods", namespace
        )

    await until("the CRD and every replica to be gone", gone, PATIENCE)
    await rig.start_operator(wait=False)  # it waits for the CRD
    await install(rig.api, [each for each in rig.chart if each["kind"] == "CustomResourceDefinition"])
    await until("the operator to be ready", rig.operator.is_ready, PATIENCE)
    await rig.apply(namespace)
    await rig.ready(namespace)
    return "removed without an operator; one that started without the CRD served again once it was back"


FAULTS = (
    Fault(
        "R11 resource deleted, operator away",
        f"Its children end with it, and it is out of the routers' document within {RETURN_S:.0f} s of the return",
        _resource,
        400,
    ),
    Fault(
        "R11 namespace deleted, operator away",
        "The namespace ends without an operator; nothing of it holds anything up",
        _namespace,
        400,
    ),
    Fault(
        "R11 CRD removed, operator away",
        "CRD, resources and replicas end without an operator; installed again, they work again",
        _crd,
        400,
    ),
)

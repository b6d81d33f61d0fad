"""Stand-ins for kubelets: nodes that exist in the API only, and whose pods run at once.

Owns the nodes, their leases and the status of their pods. What it writes of a pod is what a kubelet writes: containers
run and are ready at once unless the image says otherwise, Ready follows the readiness gates, a deleted pod ends. A dead
node writes nothing. Must not know what a pod is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Iterable

import aiohttp

from chaos.api import Api, Object, Refused

BROKEN = "no-such-image"
"""An image whose name contains this cannot be pulled."""
ADDRESS_ANNOTATION = "chaos/address"
"""On a pod that wants a certain address."""
ZONE_LABEL = "topology.kubernetes.io/zone"
_LEASES = "kube-node-lease"


class SimulatedNodes:
    """Nodes `sim-0`, `sim-1`, ..., half of them in zone a and half in zone b."""

    def __init__(self, api: Api, count: int, *, gpus: int, lease_seconds: float) -> None:
        """`lease_seconds` is how often a node says that it lives."""
        self._api = api
        self.names = [f"sim-{number}" for number in range(count)]
        self._gpus = gpus
        self._period = lease_seconds
        self._dead: set[str] = set()
        self._addresses = 0
        self._known: dict[str, Object] = {}
        """Pods by UID, as last seen."""
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.changed = asyncio.Event()
        """Set at every event of a pod."""

    @property
    def pods(self) -> Iterable[Object]:
        """Every pod, as last seen."""
        return self._known.values()

    async def start(self) -> None:
        for number, name in enumerate(self.names):
            await self._join(number, name)
        self._tasks = [
            asyncio.create_task(self._follow_pods(), name="pods"),
            asyncio.create_task(self.renew_leases(), name="leases"),
        ]

    async def close(self) -> None:
        for task in (*self._tasks, *self._busy.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._busy.values(), return_exceptions=True)

    def kill(self, *names: str) -> None:
        """Have nodes say nothing any more; their pods stay as they are."""
        self._dead |= set(names)

    async def revive(self, *names: str) -> None:
        self._dead -= set(names)
        for name in names:
            await self._report_node(name)
        for obj in list(self._known.values()):
            if obj["spec"].get("nodeName") in names:
                self._act_on(obj)

    def zone(self, letter: str) -> list[str]:
        return [name for number, name in enumerate(self.names) if "ab"[number % 2] == letter]

    async def _join(self, number: int, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, ZONE_LABEL: "ab"[number % 2]}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        await self._api.apply("nodes", "", node)
        await self._report_node(name)
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": _LEASES},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _micro_time()},
        }
        await self._api.apply("leases", _LEASES, lease)

    async def _report_node(self, name: str) -> None:
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "250", "nvidia.com/gpu": str(self._gpus)}
        now = _time()
        healthy = {
            "MemoryPressure": "False",
            "DiskPressure": "False",
            "PIDPressure": "False",
            "Ready": "True",
        }
        conditions = [
            {
                "type": kind,
                "status": status,
                "reason": "Simulated",
                "message": "",
                "lastHeartbeatTime": now,
                "lastTransitionTime": now,
            }
            for kind, status in healthy.items()
        ]
        status = {"capacity": amounts, "allocatable": amounts, "conditions": conditions}
        await self._api.request(
            "PATCH",
            f"api/v1/nodes/{name}/status",
            {"status": status},
            content="strategic-merge-patch+json",
        )

    async def renew_leases(self) -> None:
        """Say at each period that the living nodes live, and that they are ready where the cluster believes otherwise:
        on a busy machine it may miss some of it."""
        while True:
            alive = [name for name in self.names if name not in self._dead]
            await asyncio.gather(*map(self._renew_lease, alive))
            with contextlib.suppress(Refused, aiohttp.ClientError, TimeoutError, OSError):
                for node in await self._api.list("nodes"):
                    name = node["metadata"]["name"]
                    conditions = node.get("status", {}).get("conditions", ())
                    is_ready = any(
                        each["type"] == "Ready" and each["status"] == "True" for each in conditions
                    )
                    if name in alive and not is_ready:
                        await self._report_node(name)
            await asyncio.sleep(self._period)

    async def _renew_lease(self, name: str) -> None:
        with contextlib.suppress(Refused, aiohttp.ClientError, TimeoutError, OSError):
            await self._api.merge("leases", _LEASES, name, {"spec": {"renewTime": _micro_time()}})

    async def _follow_pods(self) -> None:
        async for event, obj in self._api.watch("pods"):
            uid = obj["metadata"]["uid"]
            if event == "DELETED":
                self._known.pop(uid, None)
            else:
                self._known[uid] = obj
                self._act_on(obj)
            self.changed.set()

    def _act_on(self, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        if uid not in self._busy and self.wish(obj) is not None:
            task = self._busy[uid] = asyncio.create_task(self._bring_up_to_date(uid), name="pod")
            task.add_done_callback(lambda _: self._busy.pop(uid, None))

    async def _bring_up_to_date(self, uid: str) -> None:
        while uid in self._known and (wish := self.wish(self._known[uid])) is not None:
            obj = self._known[uid]
            name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
            try:
                if wish == "delete":
                    now = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                    await self._api.delete("pods", namespace, name, now)
                    return
                stored = await self._api.request(
                    "PATCH",
                    f"api/v1/namespaces/{namespace}/pods/{name}/status",
                    {"metadata": {"uid": uid}, "status": wish},
                    content="strategic-merge-patch+json",
                )
            except Refused as error:
                if error.status in (404, 409):
                    return
                await asyncio.sleep(0.5)
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.5)
            else:
                if uid in self._known:
                    self._known[uid] = stored

    def wish(self, obj: Object) -> Object | str | None:
        """What a kubelet would write of a pod now: its status, `delete`, or nothing."""
        spec, status = obj["spec"], obj.get("status", {})
        node = spec.get("nodeName")
        if node not in self.names or node in self._dead:
            return None
        if obj["metadata"].get("deletionTimestamp"):
            return "delete"
        present = {each["type"]: each["status"] for each in status.get("conditions", ())}
        if any(BROKEN in each["image"] for each in spec["containers"]):
            if status.get("containerStatuses"):
                return None
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": f"no such image: {BROKEN}"}}
            return {
                "containerStatuses": [_container(each, waiting, ready=False) for each in spec["containers"]]
            }
        gates = [each["conditionType"] for each in spec.get("readinessGates", ())]
        is_ready = all(present.get(gate) == "True" for gate in gates)
        ready = "True" if is_ready else "False"
        if status.get("phase") == "Running" and present.get("Ready") == ready:
            return None
        now = _time()
        wanted = {"PodReadyToStartContainers": "True", "Initialized": "True", "ContainersReady": "True"}
        changed = [
            {"type": kind, "status": value, "lastTransitionTime": now}
            for kind, value in {**wanted, "Ready": ready}.items()
            if present.get(kind) != value
        ]
        if status.get("phase") == "Running":
            return {"conditions": changed}
        running = {"running": {"startedAt": now}}
        address = obj["metadata"].get("annotations", {}).get(ADDRESS_ANNOTATION) or self._next_address()
        return {
            "phase": "Running",
            "startTime": now,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "10.255.255.1",
            "conditions": changed,
            "containerStatuses": [_container(each, running, ready=True) for each in spec["containers"]],
        }

    def _next_address(self) -> str:
        self._addresses += 1
        high, low = divmod(self._addresses, 250)
        return f"127.{84 + high // 250}.{high % 250}.{low + 1}"  # where nothing listens


def _container(container: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": container["image"],
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    }


def _time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _micro_time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

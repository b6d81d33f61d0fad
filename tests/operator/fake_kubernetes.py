"""A small Kubernetes in memory: an API server, the controllers of Deployments and StatefulSets, a scheduler that counts
GPUs, kubelets.

It behaves as the real one where the operator could tell the difference: server-side apply with ownership of fields,
resource versions and generations, writes that change nothing leave no trace, cascading deletion, rolling updates
within maxSurge and maxUnavailable that wait for readiness gates and for minReadySeconds, paused rollouts, pods that
terminate before they are gone. Every `step` moves the cluster on by one observable change of each controller.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.names import (
    CONFIGMAPS,
    DEPLOYMENTS,
    EVENTS,
    FIELD_MANAGER,
    INFERENCE_SERVICES,
    LEADER_LABEL,
    NODE_TEMPLATE_ANNOTATION,
    PODS,
    ROUTABLE_GATE,
    SECRETS,
    STATEFUL_SETS,
    Kind,
    kind_of,
)
from argosy_resource.pod_fields import FETCH_CONTAINER
from argosy_resource.types import InferenceServiceStatus
from argosy_resource.validation import apply_defaults, validate_manifest

Object = dict[str, Any]
Key = tuple[Kind, str, str]
DRAIN_STEPS = 3
MOUNTING_SINCE = "2026-01-01T00:00:00Z"
NODE_DIED = "2999-01-01T00:00:00Z"
CRASH_STEPS = 2
"""Steps for which the container of a crashing image is ready."""
STEP_SECONDS = 4
"""Seconds that a step stands for where a Deployment counts them."""
READY_STEPS = 3
"""A cluster is at rest when every ready pod has been ready for more steps than this."""
Listener = Callable[[Kind, str, Object], None]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that a ResourceQuota has refused."""

    digest: str
    annotations: Object
    tries: int
    next_step: int
    condition: Object


class FakeKubernetes:
    """Implements `argosy_operator.cluster.api.Api`, and the rest of a cluster."""

    def __init__(self, *, gpus: int = 100) -> None:
        self.objects: dict[Key, Object] = {}
        self.gpus = gpus
        self.listeners: list[Listener] = []
        self.writes: list[tuple[str, str, str]] = []
        """Writes of the operator: verb, kind, name. Reads cost nothing and are not kept."""
        self.before_write: Callable[[int], None] = lambda number: None
        """Called with the number of the write that is about to happen; may raise."""
        self.is_refused: Callable[[Object], bool] = lambda obj: False
        """Whether an object that is applied has contents that the API server refuses."""
        self.metadata_reads: list[Key] = []
        """Dry runs by which the operator read an object's metadata."""
        self._written = 0
        self._counter = itertools.count(1)
        self._applied: dict[Key, Object] = {}
        self._drained: dict[Key, int] = {}
        self._ready_steps: dict[Key, int] = {}
        self._templates: dict[str, Object] = {}
        """Pod templates by their digest, as ReplicaSets keep them."""
        self.is_node_dead = False
        """The kubelet reports nothing any more, and the node controller has marked the pods."""
        self.broken_images: set[str] = set()
        """Images that cannot be pulled."""
        self.has_image: Callable[[str], bool] = lambda name: True
        """Whether a pod of this name finds its image."""
        self.failing_images: set[str] = set()
        """Images whose container exits before it is ready, and is restarted, forever."""
        self.room = 1000
        """Replicas that the node has CPUs for."""
        self.crashing_images: set[str] = set()
        """Images whose container is ready for a moment, exits, and is restarted, forever."""
        self.fetch_exit_code: int | None = 0
        """How the init containers that fetch a model end; None while they run. Those that fail start again."""
        self.admit_pod: Callable[[Object], None] = lambda pod: None
        """A mutating webhook: may change a pod before it is created."""
        self.has_quota: Callable[[str], bool] = lambda name: True
        """Whether a pod of this name, or of the Deployment of this name, may be created."""
        self.now: Callable[[], str] = lambda: "2026-01-01T00:00:00Z"
        """The clock of its controllers."""
        self.is_gated: Callable[[Object], bool] = lambda pod: False
        """Whether a gate keeps the scheduler from looking at a pod."""
        self.lacks: Callable[[Object], str] = lambda pod: ""
        """What the scheduler says of a pod that no node takes for another reason than GPUs and CPUs; empty if one
        does."""
        self._steps = 0
        self._refusals: dict[str, Refusal] = {}
        """The last attempt to create a pod that the quota refused, by UID of the Deployment."""
        self.is_unready: Callable[[Object], bool] = lambda pod: False
        """Whether the engine of a pod fails its readiness probe."""
        self.is_stuck: Callable[[Object], bool] = lambda pod: False
        """Whether a pod that terminates never goes, since its machine does not answer."""
        self.on_replaced: Callable[[Object, Object], None] = lambda deployment, pod: None
        """Called with the Deployment and a pod that its rollout is about to remove."""

    # The API, as the operator uses it

    async def serves(self, kind: Kind) -> bool:
        return True

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        items = [
            _copy(obj)
            for (each, where, _), obj in sorted(self.objects.items(), key=lambda item: item[0][1:])
            if each == kind and namespace in (None, where) and selects(labels, obj)
        ]
        return ObjectList(items, str(next(self._counter)))

    async def list_pages(
        self, kind: Kind, *, namespace: str | None, limit: int
    ) -> AsyncGenerator[ObjectList, None]:
        found = await self.list(kind, namespace=namespace)
        for start in range(0, max(1, len(found.items)), limit):
            yield ObjectList(found.items[start : start + limit], found.version)

    async def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        events: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()

        def note(each: Kind, event: str, obj: Object) -> None:
            if each == kind and namespace in (None, obj["metadata"]["namespace"]):
                events.put_nowait((event, _copy(obj)))

        for (each, _, _), obj in self.objects.items():
            if int(obj["metadata"]["resourceVersion"]) > int(version):
                note(each, "MODIFIED", obj)
        self.listeners.append(note)
        try:
            while True:
                yield await events.get()
        finally:
            self.listeners.remove(note)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return _copy(self.objects.get((kind, namespace, name)))

    async def has_namespace(self, name: str) -> bool | None:
        return None

    async def read_metadata(self, kind: Kind, namespace: str, name: str) -> Object | None:
        key = (kind, namespace, name)
        live = self.objects.get(key)
        if live is None:
            return None
        self.metadata_reads.append(key)
        return {"metadata": {**_copy(live["metadata"]), "managedFields": [self._managed_data(key)]}}

    def _managed_data(self, key: Key) -> Object:
        """The operator's fields under `data`: those it wrote that no other writer has changed since."""
        live, applied = self.objects[key].get("data", {}), self._applied.get(key, {}).get("data", {})
        fields = {f"f:{name}": {} for name, value in applied.items() if live.get(name) == value}
        return {
            "manager": FIELD_MANAGER,
            "operation": "Apply",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:data": {".": {}, **fields}},
        }

    async def create_only(self, manifest: Object) -> Object:
        kind, metadata = kind_of(manifest), manifest["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        self._write("create", key)
        if key in self.objects:
            raise ApiError("POST", 409, "already exists")
        self._applied[key] = _copy(manifest)
        self._store(key, _copy(manifest))
        return _copy(self.objects[key])

    async def replace(self, manifest: Object) -> Object:
        kind, metadata = kind_of(manifest), manifest["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        self._write("replace", key)
        live = self.objects.get(key)
        if live is None or live["metadata"]["resourceVersion"] != metadata.get("resourceVersion"):
            raise ApiError("PUT", 409, "the object has been modified")
        self._store(key, _copy(manifest))
        return _copy(self.objects[key])

    async def apply(self, manifest: Object) -> Object:
        kind, metadata = kind_of(manifest), manifest["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        self._write("apply", key)
        if self.is_refused(manifest):
            raise ApiError("PATCH", 422, "it is invalid")
        manifest = _copy(manifest)
        live = self.objects.get(key)
        uid = manifest["metadata"].pop("uid", None)  # a precondition, not a field that is owned
        if uid is not None and (live is None or live["metadata"]["uid"] != uid):
            raise ApiError("PATCH", 409, "the UID in the precondition does not match")
        if live is None:
            merged = manifest
        else:
            merged = _copy(live)
            _remove(merged, self._applied.get(key, {}), manifest)
            _merge(merged, manifest)
        self._applied[key] = manifest
        self._store(key, merged)
        return _copy(self.objects[key])

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, strategic: bool
    ) -> Object:
        key = (kind, namespace, name)
        self._write("patch-status", key)
        live = self.objects.get(key)
        if live is None:
            raise ApiError("PATCH", 404, "not found")
        if patch["metadata"]["uid"] != live["metadata"]["uid"]:
            raise ApiError("PATCH", 409, "the UID in the precondition does not match")
        changed, patch = _copy(live), _copy(patch)
        status = changed.setdefault("status", {})
        if strategic:
            conditions = {each["type"]: each for each in status.get("conditions", ())}
            for each in patch["status"]["conditions"]:
                conditions[each["type"]] = {**conditions.get(each["type"], {}), **each}
            status["conditions"] = list(conditions.values())
        else:
            status.update(patch["status"])
            if kind is INFERENCE_SERVICES:
                _check_status(status)
        self._store(key, changed)
        return _copy(self.objects[key])

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        key = (kind, namespace, name)
        self._write("patch", key)
        live = self.objects.get(key)
        if live is None:
            raise ApiError("PATCH", 404, "not found")
        if patch["metadata"]["uid"] != live["metadata"]["uid"]:
            raise ApiError("PATCH", 409, "the UID in the precondition does not match")
        changed = _copy(live)
        annotations = {**changed["metadata"].get("annotations", {}), **patch["metadata"]["annotations"]}
        kept = {name: value for name, value in annotations.items() if value is not None}
        changed["metadata"]["annotations"] = kept
        self._store(key, changed)
        return _copy(self.objects[key])

    async def patch_by_steps(self, kind: Kind, namespace: str, name: str, steps: Sequence[Object]) -> Object:
        key = (kind, namespace, name)
        self._write("patch", key)
        live = self.objects.get(key)
        if live is None:
            raise ApiError("PATCH", 404, "not found")
        changed = _copy(live)
        for step in steps:
            *parents, last = (
                part.replace("~1", "/").replace("~0", "~")
                for part in step["path"].removeprefix("/").split("/")
            )
            inner = changed
            for part in parents:
                inner = inner[int(part)] if isinstance(inner, list) else inner[part]
            last = int(last) if isinstance(inner, list) else last
            if step["op"] == "remove":
                del inner[last]
            elif step["op"] in ("add", "replace"):
                inner[last] = _copy(step["value"])
            elif inner[last] != step["value"]:
                raise ApiError("PATCH", 422, "the server rejected our request due to an error in our request")
        self._store(key, changed)
        return _copy(self.objects[key])

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self._write("delete", (kind, namespace, name))
        self.remove((kind, namespace, name))

    def _write(self, verb: str, key: Key) -> None:
        self._written += 1
        self.before_write(self._written)
        self.writes.append((verb, key[0].name, key[2]))

    # What users do

    def create(self, obj: Object) -> None:
        """`kubectl create` of any object."""
        kind = kind_of(obj)
        obj = _copy(obj)
        if kind is INFERENCE_SERVICES:
            obj["metadata"].pop("uid", None)
            _validate(msgspec.json.encode(obj, order="deterministic"))
            apply_defaults(_isvc_schema(), obj)
        self._store((kind, obj["metadata"]["namespace"], obj["metadata"]["name"]), obj)

    def edit(self, name: str, change: Callable[[Object], None], *, namespace: str = "team") -> None:
        """`kubectl edit isvc`: `change` gets the spec."""
        key = (INFERENCE_SERVICES, namespace, name)
        obj = _copy(self.objects[key])
        change(obj["spec"])
        self._store(key, obj)

    def overwrite(self, key: Key, obj: Object) -> None:
        """`kubectl replace`."""
        self._store(key, obj)

    def remove(self, key: Key) -> None:
        """`kubectl delete`: pods terminate first, everything owned goes too."""
        obj = self.objects.get(key)
        if obj is None:
            return
        if key[0] is PODS and not obj["metadata"].get("deletionTimestamp"):
            changed = _copy(obj)
            changed["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._store(key, changed)
            return
        del self.objects[key]
        self._applied.pop(key, None)
        deleted = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(next(self._counter))}}
        self._tell(key[0], "DELETED", deleted)
        for child, each in list(self.objects.items()):
            if any(
                owner["uid"] == obj["metadata"]["uid"]
                for owner in each["metadata"].get("ownerReferences", ())
            ):
                self.remove(child)

    def isvc(self, name: str = "tiny", *, namespace: str = "team") -> Object:
        return self.objects[INFERENCE_SERVICES, namespace, name]

    def condition(self, kind: str, name: str = "tiny", *, namespace: str = "team") -> Object:
        found = self.isvc(name, namespace=namespace).get("status", {}).get("conditions", ())
        return next((each for each in found if each["type"] == kind), {})

    def pods(self, *, namespace: str = "team") -> list[Object]:
        return [obj for (kind, where, _), obj in self.objects.items() if kind is PODS and where == namespace]

    def children(self, *, namespace: str = "team") -> dict[str, Object]:
        """Everything but the InferenceServices and events about them, without what differs between two runs."""
        return {
            f"{kind.name}/{name}": obj.get("spec", obj.get("data"))
            for (kind, where, name), obj in sorted(self.objects.items(), key=lambda item: item[0][1:])
            if where == namespace and kind not in (INFERENCE_SERVICES, PODS, EVENTS)
        }

    def fleet(self) -> str:
        obj = self.objects.get((CONFIGMAPS, "argosy-system", "argosy-fleet"))
        return obj["data"]["fleet.json"] if obj else ""

    # The rest of the cluster

    def step(self) -> bool:
        """Let every controller act once. False if none had anything to do."""
        before = next(self._counter)
        self._steps += 1
        self._finish_termination()
        for key, obj in list(self.objects.items()):
            if key[0] is DEPLOYMENTS:
                self._sync_deployment(key, obj)
            elif key[0] is STATEFUL_SETS:
                self._sync_stateful_set(obj)
        self._schedule()
        self._run_kubelets()
        self._count_ready_steps()
        return next(self._counter) > before + 1

    def _count_ready_steps(self) -> None:
        before, self._ready_steps = self._ready_steps, {}
        for pod in self._all_pods():
            if not is_pod_ready(pod):
                continue
            key = pod_key(pod)
            self._ready_steps[key] = before.get(key, 0) + 1
            if self._ready_steps[key] <= READY_STEPS:
                next(self._counter)  # it is still moving

    def _finish_termination(self) -> None:
        """A pod that terminates holds its GPU for some steps."""
        for key, obj in list(self.objects.items()):
            if key[0] is PODS and obj["metadata"].get("deletionTimestamp") and not self.is_stuck(obj):
                next(self._counter)
                self._drained[key] = self._drained.get(key, 0) + 1
                if self._drained[key] > DRAIN_STEPS:
                    del self._drained[key]
                    self.remove(key)

    def _sync_deployment(self, key: Key, deployment: Object) -> None:
        spec = deployment["spec"]
        pods = [
            (each, pod)
            for each, pod in self.objects.items()
            if each[0] is PODS and _owned_by(pod, deployment) and not pod["metadata"].get("deletionTimestamp")
        ]
        digest = msgspec.json.encode(spec["template"], order="deterministic").decode()
        if digest not in self._templates:
            self._templates[digest] = _copy(spec["template"])
        if spec.get("paused"):
            self._scale_paused(deployment, pods)
        else:
            self._roll(deployment, pods, digest)
        ready = sum(is_pod_ready(pod) for _, pod in pods)
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "readyReplicas": ready,
        }
        present = deployment.get("status", {})
        conditions = [each for each in present.get("conditions", ()) if each["type"] != "ReplicaFailure"]
        refusal = self._refusals.get(deployment["metadata"]["uid"])
        if refusal is not None and refusal.digest == digest:
            conditions.append(refusal.condition)
        self._store(key, {**deployment, "status": {**present, **status, "conditions": conditions}})

    def evict(self, pod: Object) -> None:
        """Remove a pod of a Deployment. Its ReplicaSet makes another one like it at once, also while the Deployment is
        paused."""
        owners = [
            obj for (kind, _, _), obj in self.objects.items() if kind is DEPLOYMENTS and _owned_by(pod, obj)
        ]
        self.remove(pod_key(pod))
        for owner in owners:
            self._create_pod(owner, _template_of(pod))

    def _scale_paused(self, deployment: Object, pods: list[tuple[Key, Object]]) -> None:
        """Scale a paused Deployment: its only ReplicaSet to its size, several to its size and surge together."""
        wanted, surge = (
            deployment["spec"]["replicas"],
            deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"],
        )
        digests = [_template_of(pod) for _, pod in pods]
        if not digests:
            return
        allowed = wanted if len(set(digests)) == 1 else wanted + surge
        for _ in range(allowed - len(pods)):
            self._create_pod(deployment, max(set(digests), key=digests.count))
        self._scale_down(deployment, pods, len(pods) - allowed, is_rollout=False)

    def _roll(self, deployment: Object, pods: list[tuple[Key, Object]], digest: str) -> None:
        spec = deployment["spec"]
        new = [pair for pair in pods if _template_of(pair[1]) == digest]
        old = [pair for pair in pods if pair not in new]
        wanted, rolling = spec["replicas"], spec["strategy"]["rollingUpdate"]
        room = wanted + (rolling["maxSurge"] if old else 0) - len(pods)
        for _ in range(max(0, min(wanted - len(new), room))):
            self._create_pod(deployment, digest)
        self._scale_down(deployment, new, len(new) - wanted, is_rollout=False)
        minimum = wanted - rolling["maxUnavailable"]
        seconds = spec.get("minReadySeconds", 0)
        unavailable_new = sum(not self._is_available(pair, seconds) for pair in new)
        excess = len(pods) - minimum - unavailable_new
        unhealthy = [pair for pair in old if not is_pod_ready(pair[1])][: max(0, excess)]
        self._scale_down(deployment, unhealthy, len(unhealthy), is_rollout=True)
        available = sum(self._is_available(pair, seconds) for pair in (*new, *old))
        self._scale_down(
            deployment, [pair for pair in old if pair not in unhealthy], available - minimum, is_rollout=True
        )

    def _is_available(self, pair: tuple[Key, Object], seconds: int) -> bool:
        return is_pod_ready(pair[1]) and self._ready_steps.get(pair[0], 0) * STEP_SECONDS >= seconds

    def _scale_down(
        self, deployment: Object, pods: list[tuple[Key, Object]], count: int, *, is_rollout: bool
    ) -> None:
        order = sorted(pods, key=lambda pair: (is_pod_ready(pair[1]), _deletion_cost(pair[1]), pair[0][2]))
        for key, pod in order[: max(0, count)]:
            if is_rollout:
                self.on_replaced(deployment, pod)
            self.remove(key)

    def _is_refused_by_quota(self, deployment: Object, digest: str) -> bool:
        """As the ReplicaSet controller: after each refusal it waits twice as long, unless its ReplicaSet changes."""
        metadata = deployment["metadata"]
        before = self._refusals.get(metadata["uid"])
        annotations = _copy(metadata.get("annotations", {}))
        is_same = before is not None and (before.digest, before.annotations) == (digest, annotations)
        if is_same and before is not None and self._steps < before.next_step:
            return True
        if self.has_quota(metadata["name"]):
            self._refusals.pop(metadata["uid"], None)
            return False
        tries = before.tries + 1 if before is not None and before.digest == digest else 1
        condition = {
            "type": "ReplicaFailure",
            "status": "True",
            "reason": "FailedCreate",
            "message": f'pods "{metadata["name"]}-x" is forbidden: exceeded quota: team, requested: pods=1',
            "lastTransitionTime": before.condition["lastTransitionTime"]
            if before and tries > 1
            else self.now(),
        }
        self._refusals[metadata["uid"]] = Refusal(
            digest=digest,
            annotations=annotations,
            tries=tries,
            next_step=self._steps + 2 ** min(tries, 10),
            condition=condition,
        )
        return True

    def _create_pod(self, deployment: Object, digest: str) -> None:
        if self._is_refused_by_quota(deployment, digest):
            return
        template, name = (
            self._templates[digest],
            f"{deployment['metadata']['name']}-{next(self._counter):06d}",
        )
        self._create_pod_of(deployment, template, name, digest=digest)

    def _sync_stateful_set(self, owner: Object) -> None:
        """Create the pods that are missing; one that terminates is still there."""
        spec, metadata = owner["spec"], owner["metadata"]
        for ordinal in range(spec["ordinals"]["start"], spec["ordinals"]["start"] + spec["replicas"]):
            name = f"{metadata['name']}-{ordinal}"
            if (PODS, metadata["namespace"], name) not in self.objects and self.has_quota(name):
                template = _copy(spec["template"])
                template["metadata"]["labels"]["apps.kubernetes.io/pod-index"] = str(ordinal)
                self._create_pod_of(owner, template, name)

    def _create_pod_of(self, controller: Object, template: Object, name: str, *, digest: str = "") -> None:
        metadata, kind = controller["metadata"], controller["kind"]
        is_of_deployment = kind == "Deployment"  # its ReplicaSets are no objects here
        owner = {
            "apiVersion": controller["apiVersion"],
            "kind": "ReplicaSet" if is_of_deployment else kind,
            "name": f"{metadata['name']}-{digest[:10]}" if is_of_deployment else metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": metadata["namespace"],
                "labels": dict(template["metadata"]["labels"]),
                "annotations": {**template["metadata"].get("annotations", {}), "template": digest},
                "ownerReferences": [owner],
            },
            "spec": _copy(template["spec"]),
        }
        self.admit_pod(pod)
        self._store((PODS, metadata["namespace"], name), pod)

    def _schedule(self) -> None:
        free = self.gpus - sum(_gpus(pod) for pod in self._all_pods() if pod["spec"].get("nodeName"))
        for pod in self._all_pods():
            if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
                continue
            changed = _copy(pod)
            if self.is_gated(pod):
                changed["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
                gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
                _set_condition(changed, gated)
                self._store(pod_key(changed), changed)
                continue
            present = sum(
                "nodeName" in each["spec"] and "ownerReferences" in each["metadata"]
                for each in self._all_pods()
            )
            if lacking := self.lacks(pod):
                condition = _unschedulable(pod, lacking, self.now())
            elif _gpus(pod) <= free and present < self.room:
                free -= _gpus(pod)
                changed["spec"]["nodeName"] = "node-a"
                condition = {"type": "PodScheduled", "status": "True"}
            else:
                lacking = "nvidia.com/gpu" if _gpus(pod) > free else "cpu"
                condition = _unschedulable(pod, f"Insufficient {lacking}", "")
            _set_condition(changed, condition)
            self._store(pod_key(changed), changed)

    def _run_kubelets(self) -> None:
        """A scheduled pod is Running after one step and its containers are ready after the next."""
        for pod in self._all_pods():
            if self.is_node_dead and pod["spec"].get("nodeName"):
                changed = _copy(pod)
                _set_condition(changed, {"type": "Ready", "status": "False", "lastTransitionTime": NODE_DIED})
                self._store(pod_key(changed), changed)
                continue
            if not pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
                continue
            status = _copy(pod.get("status", {}))
            changed = {**pod, "status": status}
            image = pod["spec"]["containers"][0]["image"]
            if (status.get("phase") != "Running" and not self._mount(changed)) or not self._run_fetch(
                changed, status
            ):
                pass
            elif image in self.broken_images or not self.has_image(pod["metadata"]["name"]):
                waiting = {"reason": "ImagePullBackOff", "message": "not found"}
                status["containerStatuses"] = [{"name": "engine", "state": {"waiting": waiting}}]
            elif image in self.failing_images:
                ended = {"reason": "Error", "exitCode": 2}
                waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
                failing = {"name": "engine", "state": {"waiting": waiting}, "ready": False}
                status["containerStatuses"] = [{**failing, "lastState": {"terminated": ended}}]
                status.pop("phase", None)
                _set_condition(changed, {"type": "ContainersReady", "status": "False"})
            elif image in self.crashing_images and self._ready_steps.get(pod_key(pod), 0) >= CRASH_STEPS:
                ended = {"reason": "Error", "exitCode": 1}
                crashed = {
                    "name": "engine",
                    "state": {"terminated": ended},
                    "ready": False,
                    "restartCount": 1,
                }
                status["containerStatuses"] = [crashed]
                status.pop("phase", None)
                _set_condition(changed, {"type": "ContainersReady", "status": "False"})
            elif status.get("phase") != "Running":
                status |= {"phase": "Running", "podIP": "10.0.0.1"}
            elif not self._has_its_nodes(pod) or self.is_unready(pod):
                _set_condition(changed, {"type": "ContainersReady", "status": "False"})
            else:
                _set_condition(changed, {"type": "ContainersReady", "status": "True"})
                if "containerStatuses" in status:
                    status["containerStatuses"][0] |= {"state": {"running": {}}, "ready": True}
            _set_condition(changed, {"type": "Ready", "status": "True" if is_pod_ready(changed) else "False"})
            self._store(pod_key(changed), changed)

    def _mount(self, pod: Object) -> bool:
        """Mount the Secrets of internal keys. Whether the pod may go on."""
        names = {volume.get("secret", {}).get("secretName", "") for volume in pod["spec"].get("volumes", ())}
        keys = [name for name in names if name.endswith("-engine-key")]
        is_mounted = all((SECRETS, pod["metadata"]["namespace"], name) in self.objects for name in keys)
        if not is_mounted:
            scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": MOUNTING_SINCE}
            _set_condition(pod, scheduled)
            _set_condition(pod, {"type": "PodReadyToStartContainers", "status": "False"})
        elif any(each["type"] == "PodReadyToStartContainers" for each in pod["status"].get("conditions", ())):
            _set_condition(pod, {"type": "PodReadyToStartContainers", "status": "True"})
        return is_mounted

    def _has_its_nodes(self, pod: Object) -> bool:
        """Whether the engine of a pod has all the nodes that it waits for."""
        described = pod["metadata"].get("annotations", {}).get(NODE_TEMPLATE_ANNOTATION, '{"workers": 0}')
        present = sum(
            each["metadata"].get("labels", {}).get(LEADER_LABEL) == pod["metadata"]["uid"]
            and each.get("status", {}).get("phase") == "Running"
            and not each["metadata"].get("deletionTimestamp")
            for each in self._all_pods()
        )
        return bool(present == json.loads(described)["workers"])

    def _run_fetch(self, pod: Object, status: Object) -> bool:
        """Move the init container on, if the pod has one. Whether the engine may start."""
        if not pod["spec"].get("initContainers"):
            return True
        (container,) = status.setdefault("initContainerStatuses", [{"name": FETCH_CONTAINER, "state": {}}])
        state = container["state"]
        if state.get("terminated", {}).get("exitCode") == 0:
            return True
        if "running" in state and self.fetch_exit_code is not None:
            message = "gave up" if self.fetch_exit_code else "28.0 GiB fetched in 70 s"
            ended = {"exitCode": self.fetch_exit_code, "message": f"fetching\n{message}\n"}
            container["state"] = {"terminated": ended}
        elif "running" not in state:
            attempt = container.get("restartCount", -1) + 1
            container |= {"state": {"running": {}}, "lastState": state, "restartCount": attempt}
            container["containerID"] = f"{pod['metadata']['name']}/{attempt}"
            status |= {"phase": "Pending", "podIP": "10.0.0.1"}
        return False

    def _all_pods(self) -> list[Object]:
        return [obj for (kind, _, _), obj in self.objects.items() if kind is PODS]

    def _store(self, key: Key, obj: Object) -> None:
        """Store a version, unless nothing changed, and notify the watchers."""
        live = self.objects.get(key)
        if live == obj:
            return
        obj = _copy(obj)
        metadata = obj["metadata"]
        number = next(self._counter)
        if live is None:
            metadata |= {"uid": f"uid-{number}", "generation": 1}
            metadata.setdefault("creationTimestamp", f"2025-01-01T00:00:{number % 60:02d}Z")
        elif live.get("spec") != obj.get("spec"):
            metadata["generation"] = live["metadata"]["generation"] + 1
        metadata["resourceVersion"] = str(number)
        self.objects[key] = obj
        self._tell(key[0], "ADDED" if live is None else "MODIFIED", obj)

    def _tell(self, kind: Kind, event: str, obj: Object) -> None:
        for listener in list(self.listeners):
            listener(kind, event, _copy(obj))


def _copy(obj: Any) -> Any:
    """A deep copy of JSON, many times faster than `copy.deepcopy`."""
    return msgspec.json.decode(msgspec.json.encode(obj))


@functools.cache
def _validate(manifest: bytes) -> None:
    validate_manifest(msgspec.json.decode(manifest))


def _check_status(status: Object) -> None:
    """Refuse what the bounds of the CRD refuse."""
    try:
        msgspec.convert(status, InferenceServiceStatus)
    except msgspec.ValidationError as error:
        raise ApiError("PATCH", 422, f"status is invalid: {error}") from error


@functools.cache
def _isvc_schema() -> Object:
    from argosy_resource import crd

    return crd.schema()


def pod_key(pod: Object) -> Key:
    return (PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])


def _template_of(pod: Object) -> str:
    return str(pod["metadata"]["annotations"]["template"])


def _deletion_cost(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", 0))


def _gpus(pod: Object) -> int:
    limits = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get("nvidia.com/gpu", 0))


def _owned_by(obj: Object, owner: Object) -> bool:
    return any(each["uid"] == owner["metadata"]["uid"] for each in obj["metadata"].get("ownerReferences", ()))


def is_pod_ready(pod: Object) -> bool:
    found = pod.get("status", {}).get("conditions", ())
    if any(each["type"] == "Ready" and each.get("lastTransitionTime") == NODE_DIED for each in found):
        return False
    conditions = {each["type"]: each["status"] for each in found}
    return conditions.get("ContainersReady") == "True" and conditions.get(ROUTABLE_GATE) == "True"


def _unschedulable(pod: Object, lacking: str, now: str) -> Object:
    """The condition, with the time since which it is so; without one if `now` is empty."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": f"0/1 nodes are available: 1 {lacking}.",
    }
    found = pod.get("status", {}).get("conditions", ())
    before = next((each for each in found if each["type"] == "PodScheduled"), {})
    return condition | ({"lastTransitionTime": before.get("lastTransitionTime", now)} if now else {})


def _set_condition(pod: Object, condition: Object) -> None:
    status = pod.setdefault("status", {})
    kept = [each for each in status.get("conditions", ()) if each["type"] != condition["type"]]
    status["conditions"] = sorted([*kept, condition], key=lambda each: each["type"])


def selects(selector: str, obj: Object) -> bool:
    """`a=b` and `a in (b,c)`, joined by commas."""
    labels = obj["metadata"].get("labels", {})
    alternatives = re.sub(r"\([^)]*\)", lambda match: match[0].replace(",", "|"), selector)
    for part in alternatives.split(",") if selector else ():
        key, _, values = part.partition(" in ") if " in " in part else part.partition("=")
        if labels.get(key) not in values.strip("()").split("|"):
            return False
    return True


_LIST_KEYS = dict.fromkeys(("containers", "initContainers", "env", "volumes"), "name") | {
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists with entries of several managers, and what tells the entries apart."""


def _merge(live: Object, wanted: Object) -> None:
    for name, value in wanted.items():
        if isinstance(value, dict) and isinstance(live.get(name), dict):
            _merge(live[name], value)
        elif name in _LIST_KEYS and live.get(name) and all(_LIST_KEYS[name] in each for each in value):
            _merge_entries(live[name], value, _LIST_KEYS[name])
        else:
            live[name] = _copy(value)


def _merge_entries(live: list[Object], wanted: list[Object], key: str) -> None:
    """Entries in the wanted order, then those of other managers."""
    before = {each.get(key): each for each in live}
    merged = []
    for entry in wanted:
        held = before.pop(entry[key], {})
        _merge(held, entry)
        merged.append(held)
    live[:] = [*merged, *before.values()]


def _remove(live: Object, before: Object, wanted: Object) -> None:
    """Remove what the manager applied before and does not apply any more."""
    for name, value in before.items():
        if name not in wanted:
            live.pop(name, None)
        elif isinstance(value, dict) and isinstance(wanted[name], dict) and isinstance(live.get(name), dict):
            _remove(live[name], value, wanted[name])
        elif name in _LIST_KEYS and live.get(name):
            _remove_entries(live[name], value, wanted[name], _LIST_KEYS[name])


def _remove_entries(live: list[Object], before: list[Object], wanted: list[Object], key: str) -> None:
    kept, held = {each.get(key): each for each in wanted}, {each.get(key): each for each in live}
    for entry in before:
        if entry.get(key) not in kept:
            live[:] = [each for each in live if each.get(key) != entry.get(key)]
        elif entry.get(key) in held:
            _remove(held[entry.get(key)], entry, kept[entry.get(key)])


assert FIELD_MANAGER == "argosy-operator", "the only manager this fake keeps track of"

"""A Kubernetes in memory for fleets that the control plane of one machine cannot hold.

Its controllers act only on what has changed: they create the pods that a Deployment lacks, remove those that it has too
many, and run every pod at once, in the steps that were recorded from a kubelet (scheduled, running, containers ready,
ready once the operator has opened the gate). It knows nothing of rollouts, quotas and nodes: for those there is
`fake_kubernetes`, whose API it has.
"""

from __future__ import annotations

import hashlib
import itertools

import msgspec
from fake_kubernetes import FakeKubernetes, Key, Object, pod_key

from argosy_operator.names import DEPLOYMENTS, PODS, Kind

AT_ONCE = 20
"""Objects that its controllers look at in one turn of the event loop."""
SCHEDULED = ("PodScheduled",)
RUNNING = ("PodReadyToStartContainers", "Initialized", "PodScheduled")


class LargeCluster(FakeKubernetes):
    """`step` acts on what has changed since the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._dirty: dict[Key, None] = {}
        self._pods: dict[str, dict[Key, None]] = {}
        """Pods by the UID of their owner."""
        self._owners: dict[str, Key] = {}
        """Deployments by their UID."""
        self._addresses = 0
        self.listeners.append(self._note)

    def step(self) -> bool:
        """Act on some of what has changed, so that its API answers meanwhile."""
        keys = list(itertools.islice(self._dirty, AT_ONCE))
        for key in keys:
            del self._dirty[key]
        for key in keys:
            obj = self.objects.get(key)
            if obj is None:
                continue
            if key[0] is DEPLOYMENTS:
                self._scale(key, obj)
            elif obj["metadata"].get("deletionTimestamp"):
                self.remove(key)
            else:
                self._run(key, obj)
        return bool(keys)

    def _tell(self, kind: Kind, event: str, obj: Object) -> None:
        for listener in list(self.listeners):
            listener(kind, event, obj)  # the same object to all: nobody here changes it

    def _note(self, kind: Kind, event: str, obj: Object) -> None:
        metadata = obj["metadata"]
        if kind is DEPLOYMENTS:
            key = (kind, metadata["namespace"], metadata["name"])
            self._owners[metadata["uid"]] = key
            self._dirty[key] = None
        elif kind is PODS:
            owner = next((each["uid"] for each in metadata.get("ownerReferences", ())), "")
            pods = self._pods.setdefault(owner, {})
            if event == "DELETED":
                pods.pop(pod_key(obj), None)
            else:
                pods[pod_key(obj)] = None
                self._dirty[pod_key(obj)] = None
            if owner in self._owners:
                self._dirty[self._owners[owner]] = None

    def _scale(self, key: Key, deployment: Object) -> None:
        spec, uid = deployment["spec"], deployment["metadata"]["uid"]
        held = [each for each in self._pods.get(uid, ()) if each in self.objects]
        pods = [each for each in held if not self.objects[each]["metadata"].get("deletionTimestamp")]
        template = spec["template"]
        for _ in range(spec["replicas"] - len(pods)):
            digest = hashlib.sha256(msgspec.json.encode(template, order="deterministic")).hexdigest()[:10]
            name = f"{deployment['metadata']['name']}-{digest}-{next(self._counter):06d}"
            self._create_pod_of(deployment, template, name, digest=digest)
        for each in pods[spec["replicas"] :]:
            self.remove(each)
        ready = sum(_condition(self.objects[each], "Ready") == "True" for each in pods)
        counts = {"replicas": len(pods), "updatedReplicas": len(pods), "readyReplicas": ready}
        status = {
            **deployment.get("status", {}), **counts, "availableReplicas": ready,
            "observedGeneration": deployment["metadata"]["generation"],
        }  # fmt: skip
        self._store(key, {**deployment, "status": status})

    def _run(self, key: Key, pod: Object) -> None:
        """Take a pod one step further."""
        status = pod.get("status", {})
        spec = pod["spec"]
        if "nodeName" not in spec:
            spec = {**spec, "nodeName": "node-a"}
            status = self._with(status, *SCHEDULED)
        elif status.get("phase") != "Running":
            container = {"name": "engine", "ready": True, "started": True, "restartCount": 0}
            status = {
                **self._with(status, *RUNNING), "phase": "Running", "podIP": self._next_address(),
                "containerStatuses": [{**container, "state": {"running": {"startedAt": self.now()}}}],
            }  # fmt: skip
        elif _condition(pod, "ContainersReady") != "True":
            status = self._with(status, "ContainersReady")
        elif all(_condition(pod, gate["conditionType"]) == "True" for gate in spec.get("readinessGates", ())):
            status = self._with(status, "Ready")
        self._store(key, {**pod, "spec": spec, "status": status})

    def _with(self, status: Object, *conditions: str) -> Object:
        """The status with these conditions True."""
        found = {each["type"]: each for each in status.get("conditions", ())}
        for name in conditions:
            if found.get(name, {}).get("status") != "True":
                found[name] = {"type": name, "status": "True", "lastTransitionTime": self.now()}
        return {**status, "conditions": list(found.values())}

    def _next_address(self) -> str:
        self._addresses += 1
        high, low = divmod(self._addresses, 250)
        return f"127.{84 + high // 250}.{high % 250}.{low + 1}"  # where nothing listens


def _condition(pod: Object, kind: str) -> str:
    found = pod.get("status", {}).get("conditions", ())
    return next((str(each["status"]) for each in found if each["type"] == kind), "")

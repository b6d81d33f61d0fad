"""Discovery in Kubernetes: a fleet document in a ConfigMap, and the pods that its selectors match. The number of
routers is counted from the router pods in the document's namespace.

Owns: which objects are watched, when what they say is published, and which pods are replicas of which service.
Must not know: custom resources. It only reads.
Invariants: an unreadable document or an unavailable API server changes nothing; a namespace whose pods cannot be listed
keeps no other one from being served. A pod is used, and gets the service's key, only if a ReplicaSet of the service
controls it, once its containers are ready, whatever its `Ready` condition says, because that condition waits for the
router; a pod being deleted is draining. A pod that changes costs no more than the services that it may belong to have
pods, since thousands of them change all the time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from argosy_protocol.fleet import REVISION_LABEL, FleetDocument, FleetService, decode_fleet
from argosy_router.discovery.reflector import RELIST_S, KubernetesObject, Reflector
from argosy_router.discovery.sources import Publish, revision_of
from argosy_router.fleet.fleet import FleetSnapshot
from argosy_router.fleet.replica import Member

log = logging.getLogger(__name__)

Label = tuple[str, str, str]
"""Namespace, name and value."""


class PodCondition(msgspec.Struct):
    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct):
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(KubernetesObject):
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def has_ready_containers(self) -> bool:
        return any(
            condition.type == "ContainersReady" and condition.status == "True"
            for condition in self.status.conditions or ()
        )

    def is_owned(self, owners: tuple[str, ...]) -> bool:
        """Whether a ReplicaSet controls the pod whose name begins with one of these."""
        return any(
            owner.controller
            and owner.kind == "ReplicaSet"
            and owner.api_version.startswith("apps/")
            and owner.name.startswith(owners)
            for owner in self.metadata.owner_references
        )


class PodMembers:
    """The members of each service."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[Member, ...]] = {}
        """By the service's qualified name, as of the last `settle`; a tuple is the same object while it does not
        change."""
        self._services: dict[str, FleetService] = {}
        self._pods: dict[str, dict[str, Pod]] = {}
        """Qualified name -> pods that its selector matches, by key."""
        self._by_label: dict[Label, list[FleetService]] = {}
        """Services by that label of their selector which the fewest services have."""
        self._changed: set[str] = set()

    def set_services(
        self, services: Sequence[FleetService], pods: Mapping[str, Iterable[Mapping[str, Pod]]]
    ) -> None:
        """Follow a new document.

        Args:
            pods: all that are known, by namespace and then key.
        """
        before, self._services = self._services, {service.qualified_name: service for service in services}
        for name in before.keys() - self._services.keys():
            del self._pods[name]
            self._members.pop(name, None)
        self._by_label = _by_rarest_label(services)
        new: dict[str, list[FleetService]] = {}
        for name, service in self._services.items():
            old = before.get(name)
            if old == service:
                continue
            self._changed.add(name)
            if old is None or old.selector != service.selector:
                self._pods[name] = {}
                new.setdefault(service.namespace, []).append(service)
        for namespace, added in new.items():
            candidates = _by_rarest_label(added)
            for known in pods.get(namespace, ()):
                for key, pod in known.items():
                    for service in _candidates(namespace, pod, candidates):
                        self._pods[service.qualified_name][key] = pod

    def change(self, namespace: str, key: str, before: Pod | None, now: Pod | None) -> None:
        """Note that a pod has changed, has come (`before` is None) or is gone (`now` is None)."""
        for pod in (before, now):
            if pod is not None:
                for service in _candidates(namespace, pod, self._by_label):
                    name = service.qualified_name
                    self._changed.add(name)
                    if pod is now:
                        self._pods[name][key] = pod
                    else:
                        self._pods[name].pop(key, None)

    def settle(self) -> dict[str, tuple[Member, ...]]:
        """Return the members of all services, after determining those of services whose pods have changed."""
        for name in self._changed & self._services.keys():
            service = self._services[name]
            members = tuple(members_of(service, self._pods[name].values()))
            if members != self._members.get(name):
                self._members[name] = members
        self._changed.clear()
        return dict(self._members)


def _by_rarest_label(services: Sequence[FleetService]) -> dict[Label, list[FleetService]]:
    counts = Counter(label for service in services for label in _labels_of(service))
    found: dict[Label, list[FleetService]] = {}
    for service in services:
        if service.selector:
            found.setdefault(min(_labels_of(service), key=counts.__getitem__), []).append(service)
    return found


def _labels_of(service: FleetService) -> list[Label]:
    return [(service.namespace, name, value) for name, value in service.selector.items()]


def _candidates(
    namespace: str, pod: Pod, by_label: Mapping[Label, Sequence[FleetService]]
) -> Iterator[FleetService]:
    """The services whose selector matches a pod."""
    labels = pod.metadata.labels
    for name, value in labels.items():
        for service in by_label.get((namespace, name, value), ()):
            if all(labels.get(each) == wanted for each, wanted in service.selector.items()):
                yield service


def count_routers(pods: Iterable[Pod], own_name: str) -> int:
    """Count the routers in service: this one, and others whose containers are ready and that are not being deleted."""
    return 1 + sum(
        pod.has_ready_containers
        for pod in pods
        if pod.metadata.name != own_name and pod.metadata.deletion_timestamp is None
    )


def members_of(service: FleetService, pods: Iterable[Pod]) -> list[Member]:
    """The pods that serve `service`, ordered by name."""
    members = []
    for pod in pods:
        metadata = pod.metadata
        if not service.selector or not pod.status.pod_ip:
            continue
        if any(metadata.labels.get(name) != value for name, value in service.selector.items()):
            continue
        if service.owners and not pod.is_owned(service.owners):
            continue
        is_draining = metadata.deletion_timestamp is not None
        if is_draining or pod.has_ready_containers:
            host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
            url = f"http://{host}:{service.port}"
            members.append(
                Member(
                    metadata.name,
                    metadata.uid,
                    url,
                    is_draining,
                    adapters=service.adapters,
                    aliases=service.aliases,
                    revision=metadata.labels.get(REVISION_LABEL, ""),
                )
            )
    return sorted(members)


def pod_selectors(services: Sequence[FleetService]) -> dict[str, str]:
    """Namespace -> label selector that matches the pods of all its services: the labels their selectors share."""
    shared: dict[str, set[tuple[str, str]]] = {}
    for service in services:
        if service.selector:
            labels = set(service.selector.items())
            shared[service.namespace] = shared.get(service.namespace, labels) & labels
    return {
        namespace: ",".join(f"{name}={value}" for name, value in sorted(labels))
        for namespace, labels in shared.items()
    }


DOCUMENT_KEY = "fleet.json"
"""Key of the document in the ConfigMap."""
ROUTER_SELECTOR = "app.kubernetes.io/name=argosy,app.kubernetes.io/component=router"
"""Labels that the Helm chart gives to router pods."""
GATHER_S = 0.05
"""Shortest time between two looks at what has changed: each goes through all pods of a service of which one has, and
they may change as often as their tenant likes."""
SETTLE_AFTER_S = 30.0
"""Seconds for which a namespace without an answer keeps the others from being published."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ConfigMap(KubernetesObject):
    data: dict[str, str] = msgspec.field(default_factory=dict)


class KubernetesDiscovery:
    """Watches one fleet document and the pods of its services."""

    def __init__(
        self,
        namespace: str,
        configmap: str,
        *,
        client: kubernetes_client.ApiClient | None = None,
        relist_s: float = RELIST_S,
        pod_name: str = "",
    ) -> None:
        """`pod_name` is the router's own pod; if empty, $POD_NAME or else the host name."""
        self._namespace = namespace
        self._configmap = configmap
        self._pod_name = pod_name or os.environ.get("POD_NAME") or socket.gethostname()
        self._client = client
        self._relist_s = relist_s
        self._document = FleetDocument()
        self._revision = ""
        self._unusable = ""
        """Revision of the last document that could not be used: it is read and told of once."""
        self._pods: dict[tuple[str, str], Reflector[Pod]] = {}
        """(namespace, label selector) -> reflector of the pods"""
        self._members = PodMembers()
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._has_told = False
        """Whether it was logged that the routers cannot be counted."""
        self._changed = asyncio.Event()

    async def run(self, publish: Publish) -> None:
        """Watch and publish until cancelled.

        Raises:
            ConfigException: there is neither a service account nor a kubeconfig.
        """
        client = self._client or await connect()
        namespace = self._namespace or own_namespace()
        path, changed, relist_s = f"/api/v1/namespaces/{namespace}", self._changed.set, self._relist_s
        name = f"metadata.name={self._configmap}"
        documents = Reflector(
            client, f"{path}/configmaps", ConfigMap, changed, field_selector=name, relist_s=relist_s
        )
        routers = Reflector(
            client, f"{path}/pods", Pod, changed, label_selector=ROUTER_SELECTOR, relist_s=relist_s
        )
        own_tasks = [
            asyncio.create_task(documents.run(), name="fleet document"),
            asyncio.create_task(routers.run(), name="router pods"),
        ]
        published: FleetSnapshot | None = None
        now = asyncio.get_running_loop().time
        looked = -math.inf
        try:
            while True:
                await self._changed.wait()
                if (wait_s := looked + GATHER_S - now()) > 0.0:
                    await asyncio.sleep(wait_s)
                looked = now()
                self._changed.clear()
                if self._read(documents.objects.values()):
                    self._follow(client)
                reflectors = [routers, *self._pods.values()]
                if not self._revision or not are_settled(reflectors, looked):
                    continue
                num_routers = self._num_routers(routers, namespace)
                snapshot = FleetSnapshot(self._document, self._revision, self._members.settle(), num_routers)
                if snapshot != published:
                    published = snapshot
                    publish(snapshot)
        finally:
            tasks = [*own_tasks, *self._tasks.values()]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()

    def _num_routers(self, routers: Reflector[Pod], namespace: str) -> int:
        """Return the number of routers, or zero, with an error in the log, if it cannot be known."""
        if routers.has_listed:
            return count_routers(routers.objects.values(), self._pod_name)
        if not self._has_told:
            self._has_told = True
            log.error(
                "routers cannot be counted, so each divides the limits of keys by --expected-routers: let this service "
                "account list and watch pods in namespace %s, or give the number of routers with --routers",
                namespace,
            )
        return 0

    def _read(self, objects: Iterable[ConfigMap]) -> bool:
        """Read the document; return whether there is a new one."""
        text = next((item.data.get(DOCUMENT_KEY) for item in objects), None)
        if text is None or (revision := revision_of(text.encode())) in (self._revision, self._unusable):
            return False
        try:
            self._document = decode_fleet(text)
        except msgspec.MsgspecError as error:
            self._unusable = revision
            log.error("fleet document is not usable, keeping the last one: %s", error)
            return False
        self._revision, self._unusable = revision, ""
        return True

    def _follow(self, client: kubernetes_client.ApiClient) -> None:
        """Follow the services of a new document, with one watch of pods per namespace, however many it has."""
        known: dict[str, list[Mapping[str, Pod]]] = {}
        for (namespace, _), reflector in self._pods.items():
            known.setdefault(namespace, []).append(reflector.objects)
        self._members.set_services(self._document.services, known)
        selectors = pod_selectors(self._document.services)
        wanted = set(selectors.items())
        replaced: dict[str, Reflector[Pod]] = {}
        """Namespace -> its pods, which stay until they have been listed by another selector: the API server may be
        away, and one namespace holds up no other."""
        for gone in self._pods.keys() - wanted:
            self._tasks.pop(gone).cancel()
            before = self._pods.pop(gone)
            if gone[0] in selectors:
                replaced[gone[0]] = before
                continue
            for key, pod in before.objects.items():
                self._members.change(gone[0], key, pod, None)
        for namespace, selector in wanted - self._pods.keys():
            predecessor = replaced.get(namespace)
            reflector = Reflector(
                client,
                f"/api/v1/namespaces/{namespace}/pods",
                Pod,
                self._changed.set,
                label_selector=selector,
                relist_s=self._relist_s,
                on_object=partial(self._members.change, namespace),
                known=None if predecessor is None else predecessor.objects,
                is_settled=predecessor is not None and predecessor.is_settled,
            )
            self._pods[namespace, selector] = reflector
            self._tasks[namespace, selector] = asyncio.create_task(reflector.run(), name=f"pods {namespace}")


def are_settled(reflectors: Sequence[Reflector[Pod]], now: float) -> bool:
    """Whether pods are known wherever they can be: each list has succeeded or is refused, or has failed for long while
    others go on succeeding, so that it is not the API server that is away."""
    succeeded_at = max((pods.succeeded_at for pods in reflectors), default=-math.inf)
    return all(
        pods.is_settled or (succeeded_at > pods.failing_since and now - pods.failing_since >= SETTLE_AFTER_S)
        for pods in reflectors
    )


async def connect() -> kubernetes_client.ApiClient:
    """Create a client for the cluster that the process runs in, or for that of the kubeconfig if KUBECONFIG is set."""
    configuration = kubernetes_client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    else:
        await kubernetes_config.load_kube_config(client_configuration=configuration)
    return kubernetes_client.ApiClient(configuration)


def own_namespace() -> str:
    """The namespace of the router's pod; outside a cluster, $POD_NAMESPACE or `default`."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return os.environ.get("POD_NAMESPACE", "default")

"""Discovery in Kubernetes: a fleet document in a ConfigMap, and the pods that its selectors match.

The number of routers is counted from the router pods in the document's namespace.

Owns: which objects are watched, and when what they say is published.
Must not know: which pods are replicas (`pod_members`), custom resources. It only reads.
Invariants: an unreadable document or an unavailable API server changes nothing; a namespace whose pods cannot be listed
keeps no other one from being served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from argosy_protocol.fleet import FleetDocument, decode_fleet
from argosy_router.discovery.pod_members import Pod, PodMembers, count_routers, pod_selectors
from argosy_router.discovery.reflector import RELIST_S, KubernetesObject, Reflector
from argosy_router.discovery.source import Publish, revision_of
from argosy_router.fleet.fleet import FleetSnapshot

log = logging.getLogger(__name__)

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
        documents = Reflector(
            client,
            f"/api/v1/namespaces/{namespace}/configmaps",
            ConfigMap,
            self._changed.set,
            field_selector=f"metadata.name={self._configmap}",
            relist_s=self._relist_s,
        )
        routers = Reflector(
            client,
            f"/api/v1/namespaces/{namespace}/pods",
            Pod,
            self._changed.set,
            label_selector=ROUTER_SELECTOR,
            relist_s=self._relist_s,
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

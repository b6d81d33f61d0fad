"""Which pods are replicas, and of which service. Kept pod by pod, since thousands of them change all the time.

Must not know: how pods are watched.
Invariants: a pod is used, and gets the service's key, only if a ReplicaSet of the service controls it, once its
containers are ready, whatever its `Ready` condition says, because that condition waits for the router; a pod being
deleted is draining. A pod that changes costs no more than the services that it may belong to have pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from argosy_protocol.fleet import REVISION_LABEL, FleetService
from argosy_router.discovery.reflector import KubernetesObject
from argosy_router.fleet.replica import Member

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

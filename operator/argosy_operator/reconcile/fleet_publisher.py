"""Publishes the fleet document: the ConfigMap that routers read.

Owns when it is written, and what services have lost in it: names, canaries, room. Must not know how a resource appears
in it, nor who gets a name (`argosy_resource.fleet_document` has both). Invariants: a document that did not change is
not written; one that is written fits into a ConfigMap, whatever tenants have created; of a namespace whose services
were not listed it keeps the entries that it had, so that a refused list takes no service from the routers, and of a
service that cannot be read, since its replicas serve on; who had a name before is read from the last document, so that
a restart forgets nothing of it; services for which it had no room keep their names while the operator runs.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Final

import msgspec

from argosy_operator.cluster.api import Api
from argosy_operator.cluster.store import Store, oversize_problem
from argosy_operator.config import OperatorConfig
from argosy_operator.desired.diff import must_apply, with_applied_hash
from argosy_operator.names import (
    CONFIGMAPS,
    FLEET_CONFIGMAP,
    FLEET_KEY,
    INFERENCE_SERVICES,
    NAME_LABEL,
    Name,
    Object,
    object_name,
    pod_owners,
)
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_protocol.fleet import FleetDocument, FleetService, decode_fleet, encode_fleet
from argosy_protocol.reports import stage
from argosy_resource.engine_command import COMPONENT_LABEL
from argosy_resource.fleet_document import (
    LostName,
    NamePolicy,
    fleet_document,
    seconds_until_next_end,
    settle_names,
    with_entries,
    within,
    without_canary,
)
from argosy_resource.types import Condition, InferenceService, parse

logger = logging.getLogger(__name__)

MAX_DOCUMENT: Final = 960 * 1024
"""Bytes. A ConfigMap holds 1 MiB, names and annotations included."""

Division = tuple[object, ...]
_DIVISION: Final = ("phase", "revision", "stableRevision", "weight", "windowSeconds")
"""Fields of status.rollout on which the document depends."""


class FleetPublisher:
    """Keeps the fleet document of all services."""

    def __init__(
        self,
        api: Api,
        store: Store,
        config: OperatorConfig,
        metrics: OperatorMetrics,
        *,
        has_listed: Callable[[str], bool],
        namespaces: Callable[[], Set[str]],
        now: Callable[[], str],
    ) -> None:
        """`has_listed` says whether the services of a namespace are known, `namespaces` which ones exist besides those
        that have services; `now` is the time (RFC 3339)."""
        self._api = api
        self._has_listed = has_listed
        self._store = store
        self._config = config
        self._metrics = metrics
        self._namespaces = namespaces
        self._now = now
        self._last = FleetDocument()
        """The last document, for the case that there is none any more."""
        self._last_whole = FleetDocument()
        """The same with the services and reservations for which it has no room."""
        self._lost: dict[str, tuple[LostName, ...]] = {}
        """Names that a service lost, by the service's key."""
        self._without_canary: frozenset[str] = frozenset()
        self._left_out: frozenset[str] = frozenset()
        """Services for which the last document has no room."""
        self._shown: dict[Name, tuple[str, float]] = {}
        """What the last document shows of each service's status: the stage of the model's fetch, and the cold start."""
        self._split: dict[Name, Division] = {}
        """How the last document divides each service between revisions."""
        self._parsed: dict[Name, tuple[Object, InferenceService]] = {}
        """Resources as parsed, so that each version is parsed once."""
        self._unread: dict[Name, str] = {}
        """UIDs of the resources that cannot be."""

    def lost_names_of(self, service: Name) -> tuple[LostName, ...]:
        """Names that a service claims and does not have, as of the last `publish`."""
        return self._lost.get("/".join(service), ())

    @property
    def changes_in_s(self) -> float | None:
        """Seconds until the last document changes by itself, as a name is reserved no longer; None if it does not."""
        return seconds_until_next_end(self._last, datetime.datetime.fromisoformat(self._now()))

    def is_left_out(self, service: Name) -> bool:
        """Whether the last document has no room for a service."""
        return "/".join(service) in self._left_out

    def lags(self, service: Name) -> bool:
        """Whether the last document shows another stage of the fetch of a service's model, or another cold start, than
        the service's status."""
        published = self._shown.get(service)
        obj = self._store.get(INFERENCE_SERVICES, *service)
        return published is not None and obj is not None and published != _shown(obj)

    def divides_differently(self, service: Name) -> bool:
        """Whether the last document divides a service in another way between revisions than its status says: that
        cannot wait."""
        obj = self._store.get(INFERENCE_SERVICES, *service)
        return service in self._shown and obj is not None and self._split.get(service) != _division(obj)

    def canary_of(self, service: Name) -> str:
        """The canary revision by which the last document divides a service; empty if it does not."""
        return _canary(self._split.get(service))

    async def publish(self) -> list[Name]:
        """Write the document if it changed. Returns the services that lost or won a name, or room in the document, or
        whose canary came or went: their status changes.

        Raises:
            ApiError: the API server refused.
        """
        live = await self._api.get(CONFIGMAPS, self._config.namespace, FLEET_CONFIGMAP)
        # No await until the policy is made: which services are read, and which namespaces, is of one moment.
        services = [each for each in self._services() if self._has_listed(each.metadata.namespace)]
        divisions = {name: _division(obj) for name, (obj, _) in self._parsed.items()}
        last = self._last_document(live)
        before_it = self._last_whole if last == self._last else last
        kept = [*self._unlisted(last), *self._kept_of_unread(before_it)]
        claimed = with_entries(fleet_document(services, pod_owners), kept)
        known = {each.namespace for each in claimed.services}
        policy = NamePolicy(namespaces=known | self._namespaces(), allowed=self._config.model_names)
        now = datetime.datetime.fromisoformat(self._now())
        await asyncio.sleep(0)  # each of these steps takes 10 ms for ten thousand names
        settled = settle_names(claimed, before_it, policy, now)
        whole = settled.document
        await asyncio.sleep(0)
        document = within(whole, MAX_DOCUMENT)
        wanted = with_applied_hash(self._configmap(encode_fleet(document).decode()))
        if must_apply(wanted, live):
            self._metrics.writes.labels(CONFIGMAPS.name, "apply").inc()
            await self._api.apply(wanted)
        self._last, self._last_whole = document, whole
        divided, self._split = self._split, divisions
        self._shown = {
            (each.namespace, each.name): ("" if each.fetch is None else each.fetch.state, each.cold_start_s)
            for each in document.services
        }
        before, self._lost = self._lost, settled.lost
        lacked, self._without_canary = self._without_canary, without_canary(document)
        missed, self._left_out = self._left_out, _names(whole) - _names(document)
        if self._left_out - missed:
            logger.warning("the fleet document has no room for %d services", len(self._left_out))
        moved = (lacked ^ self._without_canary) | (missed ^ self._left_out)
        return [
            (service.metadata.namespace, service.metadata.name)
            for service in services
            if before.get(service.key) != self._lost.get(service.key)
            or service.key in moved
            or _canary(divided.get(name := (service.metadata.namespace, service.metadata.name)))
            != _canary(divisions.get(name))
        ]

    def count_services(self) -> None:
        """Bring the gauges of services up to date, before they are read."""
        counts: Counter[str] = Counter()
        self._metrics.not_ready.clear()
        self._metrics.wanted_replicas.clear()
        for service in self._services():
            status, name = service.status, (service.metadata.namespace, service.metadata.name)
            conditions = {each.type: each for each in status.conditions}
            ready = conditions.get("Ready")
            counts[ready.status if ready is not None else "Unknown"] += 1
            if ready is None or ready.status != "True":
                self._metrics.not_ready.labels(*name, _reason(conditions)).set(1)
            scaled = status.scaling if service.spec.scaling is not None else None
            wanted = service.spec.replicas if scaled is None else scaled.wanted
            self._metrics.wanted_replicas.labels(*name).set(wanted)
        for name in self._unread:
            counts["False"] += 1
            self._metrics.not_ready.labels(*name, "InvalidSpec").set(1)
        for value in ("True", "False", "Unknown"):
            self._metrics.services.labels(value).set(counts[value])

    def _services(self) -> list[InferenceService]:
        """Every resource that can be read."""
        parsed: dict[Name, tuple[Object, InferenceService]] = {}
        unread: dict[Name, str] = {}
        for obj in self._store.all(INFERENCE_SERVICES):
            name = object_name(obj)
            cached = self._parsed.get(name)
            if cached is not None and cached[0] is obj:
                parsed[name] = cached
                continue
            try:
                parsed[name] = (obj, parse(obj))
            except msgspec.ValidationError as error:
                if obj["metadata"].get("deletionTimestamp"):
                    continue
                unread[name] = obj["metadata"]["uid"]
                if name not in self._unread:
                    logger.warning(
                        "%s/%s cannot be read, and keeps what the fleet document has of it: %s",
                        *name,
                        oversize_problem(obj) or error,
                    )
        self._parsed, self._unread = parsed, unread
        return [service for _, service in parsed.values()]

    def _last_document(self, live: Object | None) -> FleetDocument:
        """The document that routers have."""
        text = {} if live is None else live.get("data") or {}
        if FLEET_KEY not in text:
            return self._last
        try:
            return decode_fleet(text[FLEET_KEY])
        except (msgspec.MsgspecError, RecursionError) as error:
            logger.warning("the last fleet document cannot be read: %s", error)
            return self._last

    def _unlisted(self, last: FleetDocument) -> list[FleetService]:
        """The entries of the last document whose namespaces were not listed."""
        if all(map(self._has_listed, self._config.watch_namespaces)):
            return []
        return [each for each in last.services if not self._has_listed(each.namespace)]

    def _kept_of_unread(self, last: FleetDocument) -> list[FleetService]:
        """The entries of the services that cannot be read, as they were when they could."""
        return [
            each
            for each in last.services
            if self._has_listed(each.namespace) and self._unread.get((each.namespace, each.name)) == each.uid
        ]

    def _configmap(self, text: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": FLEET_CONFIGMAP,
                "namespace": self._config.namespace,
                "labels": {NAME_LABEL: "argosy", COMPONENT_LABEL: "fleet"},
            },
            "data": {FLEET_KEY: text},
        }


def _names(document: FleetDocument) -> frozenset[str]:
    return frozenset(each.qualified_name for each in document.services)


def _division(obj: Object) -> Division:
    rollout = obj.get("status", {}).get("rollout") or {}
    return tuple(rollout.get(field) for field in _DIVISION)


def _canary(division: Division | None) -> str:
    return str(division[_DIVISION.index("revision")] or "") if division else ""


def _shown(obj: Object) -> tuple[str, float]:
    status = obj.get("status", {})
    return stage(status.get("modelCache") or ""), (status.get("scaling") or {}).get("coldStartSeconds", 0)


def _reason(conditions: Mapping[str, Condition]) -> str:
    """Why a service is not ready. While a canary's revision is rolled out, Ready's reason is that of a replica."""
    ready, progressing = conditions.get("Ready"), conditions.get("Progressing")
    if progressing is not None and progressing.status == "True" and progressing.reason.startswith("Canary"):
        return progressing.reason
    return "NotSeen" if ready is None else ready.reason

"""Writes a service's children: applies what differs, removes what others have added, deletes what is surplus.

Owns the guards of each write, and the memory of what was checked. Must not decide what a child looks like, nor how a
key is derived, nor where a service names Secrets. Invariants:

    ChildWriter   an object that is not ours is never touched; a write reaches exactly the object that was looked at, or
                  none
    Contention    an object that another writer changes as soon as it is applied (a mutating webhook) is not written
                  over and over; a controller that changes a pod template again some time after each repair does not get
                  the replicas rolled out each time; what is noted of an object that is gone is forgotten when another
                  one is noted, so there are never more notes than objects
    KeySecrets    the Secrets with the engines' internal keys are never read, only their metadata: their content never
                  reaches the operator; one that the service does not control is never written; an intact one costs no
                  write, and one look per resync, edit of the service, and pod whose volumes are being mounted
    NamedSecrets  Secrets of an operator that a service names are refused, by their labels: no Deployment is applied
                  before every name of it was looked at since the last edit of the service and the last resync; one
                  reconcile asks for SECRETS_AT_ONCE names, since a service may name hundreds, each costs a request, and
                  meanwhile its worker reconciles no service of another tenant; at rest nothing is asked
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.cluster.api import Api, ApiError, ChildNotOwned, SecretReserved
from argosy_operator.cluster.store import Store, kept_fields
from argosy_operator.desired.children import named_secrets, reserved
from argosy_operator.desired.diff import ChildChange, Path, additions, clashes, contains, must_apply
from argosy_operator.names import (
    APPLIED_ANNOTATION,
    FIELD_MANAGER,
    MANAGED_BY_LABEL,
    PODS,
    REVISION_LABEL,
    SECRETS,
    Kind,
    Name,
    Object,
    annotations_of,
    kind_of,
    object_name,
)
from argosy_operator.observation import controller_uid, is_owned
from argosy_operator.pod import Pod
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.workqueue import run_together
from argosy_resource.types import InferenceService

logger = logging.getLogger(__name__)

MAX_REPAIRS: Final = 3
"""How often a pod template is given back what it should be, if others change it in the same way each time."""
REPAIR_WINDOW_S: Final = 3600.0
"""A repair that is longer ago does not count: people try things out, controllers do not pause for so long."""
SECRETS_AT_ONCE: Final = 16
"""Names that one reconcile asks for. The rest is asked for behind the services that wait."""

_Key = tuple[Kind, Name]


async def patched(
    store: Store, metrics: OperatorMetrics, kind: Kind, verb: str, patch: Awaitable[Object]
) -> Object | None:
    """Send a patch that names its object's UID, and store what came of it. None if the object is gone, or was replaced:
    an event is on the way."""
    metrics.writes.labels(kind.name, verb).inc()
    try:
        stored = await patch
    except ApiError as error:
        if error.status in (404, 409):
            return None
        raise
    store.put(kind, stored)
    return stored


class ChildWriter:
    """Writes Services, PodDisruptionBudgets, Deployments and StatefulSets of all services."""

    def __init__(self, api: Api, store: Store, metrics: OperatorMetrics) -> None:
        self._api = api
        self._store = store
        self._metrics = metrics
        self._contention = Contention(store)

    @property
    def num_contested(self) -> int:
        """Number of objects that are left alone."""
        return self._contention.num_contested

    def may_write(self, change: ChildChange) -> bool:
        """Whether a child is not left alone."""
        return not self._contention.is_left_alone(change.wanted, change.live)

    async def apply(self, change: ChildChange) -> Object | None:
        """Apply a child. Returns it as stored; None if nothing was written.

        Raises:
            ChildNotOwned: an object of this name has another owner.
            ApiError: the API server refused, or the object was replaced meanwhile; try again.
        """
        wanted = change.wanted
        kind, name = kind_of(wanted), object_name(wanted)
        live = change.live or await self._api.get(kind, *name)
        if live is not None and controller_uid(live) != controller_uid(wanted):
            raise ChildNotOwned(kind.name, name[1])
        if not must_apply(wanted, live) or self._contention.is_left_alone(wanted, live):
            return None
        repair = self._contention.next_repair(wanted, live)
        is_given_up = repair is not None and repair.is_given_up
        if live is not None and is_given_up and _applied_hash(live) == _applied_hash(wanted):
            logger.warning(
                "%s %s/%s: others have changed its pod template again after each repair; it is left as it is now",
                kind.name,
                *name,
            )
            self._contention.note_contested(wanted, live)
            return None
        stored = await self._write(kind, wanted, live)
        if not is_given_up and (added := additions(stored, wanted)):
            stored = await self._remove(kind, stored, added)
        if must_apply(wanted, stored):
            logger.warning("%s %s/%s is changed by another writer as soon as it is applied", kind.name, *name)
            self._contention.note_contested(wanted, stored)
        else:
            self._contention.note_settled(wanted, repair)
        return stored

    async def delete(self, kind: Kind, obj: Mapping[str, Any]) -> None:
        """Delete exactly this object; one that is gone is no error."""
        self._metrics.writes.labels(kind.name, "delete").inc()
        await self._api.delete(kind, *object_name(obj), uid=obj["metadata"]["uid"])

    async def delete_pod(self, namespace: str, pod: Pod) -> None:
        """Delete exactly this pod; one that is gone is no error."""
        self._metrics.writes.labels(PODS.name, "delete").inc()
        await self._api.delete(PODS, namespace, pod.name, uid=pod.uid)

    async def remove_annotation(self, kind: Kind, obj: Mapping[str, Any], annotation: str) -> Object | None:
        """Remove an annotation from exactly this object, whoever has written it. Returns the object as stored; None if
        it is gone."""
        patch = {"metadata": {"uid": obj["metadata"]["uid"], "annotations": {annotation: None}}}
        sent = self._api.patch(kind, *object_name(obj), patch)
        return await patched(self._store, self._metrics, kind, "patch", sent)

    async def _remove(self, kind: Kind, obj: Object, parts: Sequence[Path]) -> Object:
        """Remove what others have added to an object that was applied just now: applying only takes back what the
        operator has applied itself. Returns the object as stored: unchanged if these parts are not what they were."""
        pointers = [_pointer(path) for path in parts]
        shown = ", ".join(pointers[:5]) + (", ..." if len(parts) > 5 else "")
        logger.warning("%s %s/%s: removing what others have added: %s", kind.name, *object_name(obj), shown)
        tests = {"/metadata/uid": obj["metadata"]["uid"]}
        tests |= {pointer: _part(obj, path) for pointer, path in zip(pointers, parts, strict=True)}
        steps = [{"op": "test", "path": pointer, "value": value} for pointer, value in tests.items()]
        steps += [{"op": "remove", "path": pointer} for pointer in pointers]
        stored = await self._patched(kind, obj, steps)
        self._store.put(kind, stored)
        return stored

    async def _patched(self, kind: Kind, obj: Object, steps: Sequence[Object]) -> Object:
        """Returns the object as stored: unchanged if it is not what the steps expect."""
        self._metrics.writes.labels(kind.name, "patch").inc()
        try:
            return await self._api.patch_by_steps(kind, *object_name(obj), steps)
        except ApiError as error:
            if error.status in (404, 409, 422):  # gone, replaced or changed: an event is on the way
                return obj
            raise

    async def _write(self, kind: Kind, manifest: Object, live: Mapping[str, Any] | None) -> Object:
        """Apply to exactly the object that was looked at, or to none: the store may lag behind, and the object that
        has taken its place since may be somebody else's."""
        self._metrics.writes.labels(kind.name, "apply").inc()
        if live is not None:
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": live["metadata"]["uid"]}}
        try:
            stored = await self._api.apply(manifest)
        except ApiError as error:
            if error.status != 422 or live is None or not clashes(live, manifest):
                raise
            await self._replace(kind, manifest, error)
            stored = await self._disown(kind, await self._api.apply(manifest))
        self._store.put(kind, stored)
        return stored

    async def _replace(self, kind: Kind, manifest: Object, refusal: ApiError) -> None:
        """Replace the spec of exactly this object, with the labels and annotations that belong to it, so that it can be
        applied."""
        logger.warning("%s %s/%s: replacing what others have changed", kind.name, *object_name(manifest))
        metadata = manifest["metadata"]
        steps: list[Object] = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "replace", "path": "/spec", "value": manifest["spec"]},
        ]
        for field in ("labels", "annotations"):
            steps += [
                {"op": "add", "path": _pointer(("metadata", field, name)), "value": value}
                for name, value in metadata[field].items()
            ]
        self._metrics.writes.labels(kind.name, "patch").inc()
        try:
            await self._api.patch_by_steps(kind, *object_name(manifest), steps)
        except ApiError as error:
            # What cannot be had was refused for another reason at first.
            raise (refusal if error.status == 422 else error) from error

    async def _disown(self, kind: Kind, obj: Object) -> Object:
        """Give up what the patch has made the operator's own besides what it has applied: it would keep fields that are
        not applied any more. Returns the object as stored."""
        entries = obj["metadata"].get("managedFields", ())
        steps: list[Object] = []
        for index, entry in reversed(list(enumerate(entries))):
            is_applied = entry.get("operation") == "Apply" or entry.get("subresource")
            if entry.get("manager") == FIELD_MANAGER and not is_applied:
                path = _pointer(("metadata", "managedFields", index))
                steps += [{"op": "test", "path": path, "value": entry}, {"op": "remove", "path": path}]
        return await self._patched(kind, obj, steps) if steps else obj


def _pointer(path: Path) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _part(obj: Any, path: Path) -> Any:
    return functools.reduce(lambda found, part: found[part], path, obj)


class Contention:
    """What is known of other writers of children."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._contested: dict[_Key, tuple[str, str]] = {}
        """Objects that are left alone until either changes: hash of what was sent, and of what it led to. (Not its
        generation, which a Service does not have.)"""
        self._repairs: dict[_Key, Repair] = {}
        """The last one of each object."""

    @property
    def num_contested(self) -> int:
        """Number of objects that are left alone."""
        return len(self._contested)

    def is_left_alone(self, wanted: Object, live: Mapping[str, Any] | None) -> bool:
        """Whether applying the same manifest has led to the same object before."""
        return self._contested.get(_key(wanted)) == (_applied_hash(wanted), _contents(wanted, live))

    def next_repair(self, wanted: Object, live: Mapping[str, Any] | None) -> Repair | None:
        """The repair of a pod template that others have changed since it was applied; None if nobody has."""
        found, own = ((each or {}).get("spec", {}).get("template") for each in (live, wanted))
        if live is None or own is None or _revision(found) != _revision(own) or contains(found, own):
            return None  # what the operator changes itself is no repair
        state = xxhash.xxh3_64_hexdigest(msgspec.json.encode([found, own], order="deterministic"))
        now = asyncio.get_running_loop().time()
        before = self._repairs.get(_key(wanted))
        is_again = before is not None and before.state == state and now - before.time <= REPAIR_WINDOW_S
        return Repair(state, before.number + 1 if before is not None and is_again else 1, now)

    def note_contested(self, wanted: Object, live: Mapping[str, Any]) -> None:
        """Leave the object alone until it, or the manifest, changes."""
        self._forget_gone(self._contested)
        self._contested[_key(wanted)] = _applied_hash(wanted), _contents(wanted, live)

    def note_settled(self, wanted: Object, repair: Repair | None) -> None:
        """The object is as it was applied, by this repair if it was one."""
        self._contested.pop(_key(wanted), None)
        if repair is not None:
            self._forget_gone(self._repairs)
            self._repairs[_key(wanted)] = repair

    def _forget_gone(self, notes: dict[_Key, Any]) -> None:
        for key in [(kind, name) for kind, name in notes if self._store.get(kind, *name) is None]:
            del notes[key]


class Repair(Struct, frozen=True):
    """A pod template that others had changed since it was applied is given back what it should be."""

    state: str
    """Hash of what was found, and of what was wanted."""
    number: int
    """How many of these there have been in a row, with this one."""
    time: float

    @property
    def is_given_up(self) -> bool:
        return self.number > MAX_REPAIRS


def _applied_hash(obj: Mapping[str, Any]) -> str:
    """Hash of the manifest that was applied last; empty if there is none."""
    return annotations_of(obj).get(APPLIED_ANNOTATION, "")


def _key(obj: Object) -> _Key:
    return kind_of(obj), object_name(obj)


def _revision(template: Object | None) -> str:
    return str((template or {}).get("metadata", {}).get("labels", {}).get(REVISION_LABEL, ""))


def _contents(wanted: Object, live: Mapping[str, Any] | None) -> str:
    """Hash of what the operator could have written of an object; empty if there is none."""
    if live is None:
        return ""
    kept = kept_fields(kind_of(wanted), dict(live))
    metadata = [kept["metadata"].get(name) for name in ("uid", "labels", "annotations")]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode([metadata, kept.get("spec")], order="deterministic"))


class _Check(Struct, frozen=True, kw_only=True):
    """What was known when a Secret was found intact, or was written. The next check follows when any of it changes."""

    digest: str
    """Hash of the Secret as it is wanted."""
    generation: int
    """The service's: an edit of it checks the Secret, since it may start pods."""
    unmounted: frozenset[tuple[str, bool]]
    """The pods that waited for their volumes, which a missing Secret holds up: UID, and whether for long."""


class KeySecrets:
    """The Secrets of all services. Bounded by the number of services."""

    def __init__(self, api: Api, metrics: OperatorMetrics) -> None:
        self._api = api
        self._metrics = metrics
        self._checked: dict[str, _Check] = {}
        """By UID of a service: the last check since the last resync."""

    def check_all_again(self) -> None:
        """Have the next `ensure` of every service check its Secret, as a resync does."""
        self._checked.clear()

    async def ensure(
        self,
        service: InferenceService,
        wanted: Object,
        *,
        is_suspect: bool,
        unmounted: frozenset[tuple[str, bool]] = frozenset(),
    ) -> None:
        """Create the Secret, or repair it. Asks the API server once per resync, edit of the service and pod of
        `unmounted`, and whenever `is_suspect` says that the Secret may be missing or changed.

        Args:
            unmounted: the pods that wait for their volumes: UID, and whether for long.

        Raises:
            ChildNotOwned: a Secret of another owner has this name.
            ApiError: the API server refused, or the Secret was replaced meanwhile; try again.
        """
        name, uid = object_name(wanted), service.metadata.uid
        digest = wanted["metadata"]["annotations"][APPLIED_ANNOTATION]
        check = _Check(digest=digest, generation=service.metadata.generation, unmounted=unmounted)
        if not is_suspect and _covers(self._checked.get(uid), check):
            return
        self._checked.pop(uid, None)
        live = await self._api.read_metadata(SECRETS, *name)
        if live is None:
            self._metrics.writes.labels(SECRETS.name, "create").inc()
            await self._api.create_only(wanted)
        elif not is_owned(live, service):
            raise ChildNotOwned(SECRETS.name, name[1])
        elif not _is_intact(live, wanted):
            self._metrics.writes.labels(SECRETS.name, "apply").inc()
            same = {**wanted["metadata"], "uid": live["metadata"]["uid"]}
            await self._api.apply({**wanted, "metadata": same})
        self._checked[uid] = check


def _covers(last: _Check | None, now: _Check) -> bool:
    """Whether nothing has happened since the last check that calls for another one."""
    return (
        last is not None
        and (last.digest, last.generation) == (now.digest, now.generation)
        and last.unmounted >= now.unmounted
    )


def _is_intact(live: Mapping[str, Any], wanted: Object) -> bool:
    """Whether the metadata show that the Secret is as it was written: its labels and annotations (a hash of the content
    among them) are as wanted, and the operator manages each field of its data. The API server takes a field away from
    its manager when another writer changes or removes it."""
    ours: set[str] = set()
    for entry in live["metadata"].get("managedFields", ()):
        if entry.get("manager") == FIELD_MANAGER:
            ours |= entry.get("fieldsV1", {}).get("f:data", {}).keys()
    return contains(live["metadata"], wanted["metadata"]) and ours >= {f"f:{key}" for key in wanted["data"]}


class NamedSecrets:
    """The Secrets that services name. Bounded by the number of services."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._checked: dict[str, tuple[int, set[str]]] = {}
        """By UID of a service: its generation, and the names that no operator's Secret had."""

    def check_all_again(self) -> None:
        """Have the next `check` of every service look at all of its names, as a resync does."""
        self._checked.clear()

    async def check(self, service: InferenceService) -> bool:
        """Look at names that were not looked at yet. False if some are left: check again.

        Raises:
            SecretReserved: an operator has made one of them, under whatever name.
            ApiError: the API server refused.
        """
        metadata = service.metadata
        generation, known = self._checked.get(metadata.uid, (metadata.generation, set()))
        if generation != metadata.generation:
            known = set()
        left = sorted(named_secrets(service) - known)
        if not left:
            return True
        self._checked[metadata.uid] = metadata.generation, known
        made = await run_together(
            partial(self._is_made, metadata.namespace, name, known) for name in left[:SECRETS_AT_ONCE]
        )
        if any(made):
            named = [f"the Secret {name}" for name, is_one in zip(left, made, strict=False) if is_one]
            raise SecretReserved(reserved(named).message)
        return len(left) <= SECRETS_AT_ONCE

    async def _is_made(self, namespace: str, name: str, known: set[str]) -> bool:
        live = await self._api.read_metadata(SECRETS, namespace, name)
        if live is not None and live["metadata"].get("labels", {}).get(MANAGED_BY_LABEL) == FIELD_MANAGER:
            return True
        known.add(name)
        return False

"""Writes a service's children: applies what differs, removes what others have added, deletes what is surplus.

Owns the guards of each write. Must not decide what a child looks like. Invariants: an object that is not ours is never
touched; a write reaches exactly the object that was looked at, or none; what others change again and again is left
alone (`contention`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from argosy_operator.cluster.api_server import Api
from argosy_operator.cluster.store import Store
from argosy_operator.desired.diff import ChildChange
from argosy_operator.desired.drift import Path, additions, clashes, must_apply
from argosy_operator.errors import ApiError, ChildNotOwned
from argosy_operator.kinds import PODS, Kind, Object, kind_of, object_name
from argosy_operator.names import FIELD_MANAGER
from argosy_operator.observed.observation import controller_uid
from argosy_operator.observed.pod import Pod
from argosy_operator.reconcile.contention import Contention, applied_hash
from argosy_operator.reconcile.metrics import OperatorMetrics

logger = logging.getLogger(__name__)


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
        if live is not None and is_given_up and applied_hash(live) == applied_hash(wanted):
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
        self._metrics.writes.labels(kind.name, "patch").inc()
        patch = {"metadata": {"uid": obj["metadata"]["uid"], "annotations": {annotation: None}}}
        try:
            stored = await self._api.patch(kind, *object_name(obj), patch)
        except ApiError as error:
            if error.status in (404, 409):  # gone, or replaced
                return None
            raise
        self._store.put(kind, stored)
        return stored

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
    """JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _part(obj: Any, path: Path) -> Any:
    return functools.reduce(lambda found, part: found[part], path, obj)

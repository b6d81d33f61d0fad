"""Keeps each service's Secret with the engines' internal key, without reading Secrets.

Owns when a Secret is checked, and what a check leads to. Must not know how the key is derived. Invariants: a Secret
that the service does not control is never written; the content of a Secret never reaches the operator; an intact
Secret costs no write, and one dry run per resync, edit of the service, and pod whose volumes are being mounted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from argosy_operator.cluster.api_server import Api
from argosy_operator.desired.drift import contains
from argosy_operator.errors import ChildNotOwned
from argosy_operator.kinds import SECRETS, Object, object_name
from argosy_operator.names import APPLIED_ANNOTATION, FIELD_MANAGER
from argosy_operator.observed.observation import is_owned
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_resource.types import InferenceService


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
        elif not is_intact(live, wanted):
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


def is_intact(live: Mapping[str, Any], wanted: Object) -> bool:
    """Whether the metadata show that the Secret is as it was written: its labels and annotations (a hash of the content
    among them) are as wanted, and the operator manages each field of its data. The API server takes a field away from
    its manager when another writer changes or removes it."""
    ours: set[str] = set()
    for entry in live["metadata"].get("managedFields", ()):
        if entry.get("manager") == FIELD_MANAGER:
            ours |= entry.get("fieldsV1", {}).get("f:data", {}).keys()
    return contains(live["metadata"], wanted["metadata"]) and ours >= {f"f:{key}" for key in wanted["data"]}

"""The API server as the operator uses it: a few verbs on a handful of kinds, and the operator's errors.

Owns the protocol `Api`, which tests implement with a fake. Must not know the client behind it (`kubernetes_api`), nor
what is written or why. Invariant: every method raises `ApiError` and nothing else. Each error carries the condition
reason that it is reported under:

    OperatorError
    ├── ApiError          the API server refused or did not answer; retried with back-off
    ├── ChildNotOwned     an object with a child's name has another owner; a person must rename one of the two
    └── SecretReserved    a service names a Secret that an operator has made; its author must remove it

    HistoryLost           the cluster's state was replaced by an earlier one; the process ends
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import ClassVar, Final, Protocol

from msgspec import Struct

from argosy_operator.names import Kind, Object

RETRY: Final = 5.0
"""Seconds until the next attempt after a failure, and after a watch that lasted no longer."""
REFUSED_RETRY: Final = 300.0
"""Seconds until the next attempt where there is no permission, or no such kind."""
REFUSALS: Final = (401, 403, 404)


class ObjectList(Struct, frozen=True):
    """All objects of a kind, as of one resource version."""

    items: Iterable[Object]
    """Of a page they are read one by one, once: each may take 50 MB, and only some of it is kept."""
    version: str = ""
    are_kept: bool = False
    """Whether the items are no more than what the store keeps of them."""


class Api(Protocol):
    """The calls to an API server that the operator needs. Every method raises `ApiError` and nothing else."""

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server serves the kind: right after its CRD was created, it may not yet."""
        ...

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        """All objects of a kind that `labels` select; `namespace` None for all namespaces."""
        ...

    def list_pages(
        self, kind: Kind, *, namespace: str | None, limit: int
    ) -> AsyncGenerator[ObjectList, None]:
        """The same in lists of at most `limit` objects. Each is asked for when the one before was consumed, and none
        is kept: for objects that may be large. `ApiError` 410 if the first one's version is too old by then."""
        ...

    def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """What changes after the list of `version`, until the API server ends the watch after some minutes: event
        type (`ADDED`, `MODIFIED`, `DELETED`) and object. `ApiError` 410 if the version is too old."""
        ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object; None if there is none."""
        ...

    async def has_namespace(self, name: str) -> bool | None:
        """Whether a Namespace of this name exists; None if this client may not ask, or something else answers."""
        ...

    async def read_metadata(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object's metadata alone (managedFields included); None if there is none. Needs the permission to patch,
        and none to read."""
        ...

    async def create_only(self, manifest: Object) -> Object:
        """Create the object. `ApiError` 409 if one of this name exists."""
        ...

    async def replace(self, manifest: Object) -> Object:
        """Replace the object. `ApiError` 409 unless it still has the manifest's `resourceVersion`."""
        ...

    async def apply(self, manifest: Object) -> Object:
        """Server-side apply with the operator's field manager, conflicts forced. Returns the object as
        stored. With a UID in the manifest, `ApiError` 409 unless the object of this name has that UID."""
        ...

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, strategic: bool
    ) -> Object:
        """Patch the status subresource: strategic merge for built-in kinds, merge patch for ours."""
        ...

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """Merge patch of the object itself, whose UID the patch must name. Returns the object as stored."""
        ...

    async def patch_by_steps(self, kind: Kind, namespace: str, name: str, steps: Sequence[Object]) -> Object:
        """JSON patch (RFC 6902) of the object itself, which must test its UID. Returns the object as stored. `ApiError`
        409 or 422 if a test failed."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete exactly this object; one that is gone is no error."""
        ...


class OperatorError(Exception):
    """Base of the tree."""

    reason: ClassVar[str] = "ReconcileError"


class ApiError(OperatorError):
    """A request to the API server failed. `status` is the HTTP status, 0 if there was no answer."""

    reason = "ApiError"

    def __init__(self, action: str, status: int, message: str) -> None:
        super().__init__(f"{action}: {status or 'no answer'}: {message[:512]}")
        self.action = action
        self.status = status
        self.message = message

    @property
    def is_unclear(self) -> bool:
        """Whether a write may have been carried out all the same."""
        return self.status == 0 or self.status >= 500

    @property
    def is_namespace_ending(self) -> bool:
        """Whether an object was not created because its namespace is being deleted."""
        return self.status == 403 and "because it is being terminated" in self.message


class ChildNotOwned(OperatorError):
    """An object has the name of a child, and the InferenceService does not control it. It is never taken over."""

    reason = "ChildNotOwned"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name!r} exists and is not controlled by this InferenceService; delete it, or rename "
            "the InferenceService"
        )


class SecretReserved(OperatorError):
    """A service names Secrets that an operator has made, as their labels say."""

    reason = "ObjectReserved"


class HistoryLost(Exception):
    """The API server's versions are earlier than before, so that nothing new can be told from what is stored. No
    service's failure, and none that another attempt of this process gets over."""

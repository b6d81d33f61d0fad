"""The API server as the operator uses it: a few verbs on a handful of kinds.

Owns the protocol `Api`, which tests implement with a fake. Must not know the client behind it (`kubernetes_api`), nor
what is written or why. Invariant: every method raises `ApiError` and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from argosy_operator.kinds import Kind, Object


class ObjectList(Struct, frozen=True):
    """All objects of a kind, as of one resource version."""

    items: Iterable[Object]
    """Of a page they are read one by one, once: each may take 50 MB, and only some of it is kept."""
    version: str = ""


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

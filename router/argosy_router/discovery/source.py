"""The interface between a source of replicas and the fleet.

Must not know: any one source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import xxhash

from argosy_protocol.fleet import FleetDocument
from argosy_router.fleet.fleet import FleetSnapshot
from argosy_router.fleet.replica import Member

Publish = Callable[[FleetSnapshot], None]


class Discovery(Protocol):
    """A source of replicas."""

    async def run(self, publish: Publish) -> None:
        """Publish a snapshot whenever something has changed, until cancelled."""
        ...


def snapshot_of(document: FleetDocument, data: bytes) -> FleetSnapshot:
    """Build the snapshot of a document that lists its replicas itself; `data` is the document as read."""
    members = {
        service.qualified_name: tuple(
            Member(
                endpoint.name,
                "",
                endpoint.url,
                endpoint.draining,
                adapters=service.adapters,
                aliases=service.aliases,
                revision=endpoint.revision,
            )
            for endpoint in service.endpoints
        )
        for service in document.services
    }
    return FleetSnapshot(document, revision_of(data), members)


def revision_of(data: bytes) -> str:
    """The revision by which routers and the operator identify one state of the fleet document."""
    return xxhash.xxh3_64_hexdigest(data)

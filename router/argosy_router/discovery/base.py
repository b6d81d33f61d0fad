"""What every source of replicas looks like.

Owns: the protocol between a source and the fleet. Must not know: any source.
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
    async def run(self, publish: Publish) -> None:
        """Publishes a snapshot whenever something changed, until cancelled."""
        ...


def snapshot_of(document: FleetDocument, data: bytes) -> FleetSnapshot:
    """Snapshot of a document that lists its replicas itself; `data` is the document as read."""
    members = {
        service.key: tuple(
            Member(
                endpoint.name,
                "",
                endpoint.url,
                endpoint.draining,
                adapters=service.adapters,
                aliases=service.aliases,
            )
            for endpoint in service.endpoints
        )
        for service in document.services
    }
    return FleetSnapshot(document, revision_of(data), members)


def revision_of(data: bytes) -> str:
    """How routers and operator name one state of the fleet document."""
    return xxhash.xxh3_64_hexdigest(data)

"""Fault attribution: whether the request or a replica is at fault for an error.

Owns: which replicas answered a request with an error, until it is known whose fault that is.
Must not know: retries, how ejection works.

If a second replica fails the request with the same status, the request is at fault: it is retried no more, and the
error counts against no replica. If another replica can answer it, the replicas that failed it are at fault. If no other
replica can be asked, nobody is blamed. A unary request whose whole time passes while its replica computes is at fault
itself: another replica would need as long for it.
"""

from __future__ import annotations

from argosy_router.fleet.replica import Replica


class FaultAttribution:
    """The replicas that failed one request with an ambiguous error."""

    __slots__ = ("_failed", "is_request_at_fault")

    def __init__(self) -> None:
        self._failed: list[tuple[Replica, int]] = []
        self.is_request_at_fault = False
        """Whether two replicas failed the request with the same status, or the request is too long."""

    def add(self, replica: Replica, status: int) -> None:
        """Note that the replica answered with this status, which is an error."""
        self.is_request_at_fault |= any(
            before == status and other is not replica for other, before in self._failed
        )
        self._failed.append((replica, status))

    def add_timeout(self) -> None:
        """Note that the whole time of a unary request passed while its replica computed."""
        self.is_request_at_fault = True

    def take(self) -> list[tuple[Replica, int]]:
        """Return the replicas with the status that each answered, and forget them."""
        failed, self._failed = self._failed, []
        return failed

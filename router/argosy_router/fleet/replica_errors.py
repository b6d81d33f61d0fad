"""Errors of a replica that its HTTP connection does not show: telemetry tells of them.

Must not know: attempts, retries.
"""

# Not compiled: only declares exceptions.

from __future__ import annotations

from argosy_router.http.upstream_errors import UpstreamError


class CoreStalled(UpstreamError):
    """The replica's engine core has not run a step for too long."""

    reason = "stalled"

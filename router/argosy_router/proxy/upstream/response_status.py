"""What the status of a replica's response says about the request and about the replica.

Owns: this table, and the errors that stand for its rows. Must not know: retries, how ejection works.

| status | the request | the replica |
|---|---|---|
| 429, 503 | is retried elsewhere | is full or shutting down: not at fault, in cooldown for as long as it says |
| 503 with `x-argosy-resource-busy` | is retried elsewhere | refuses requests like this one: not at fault, no cooldown |
| 401 | is sent again with each other key of the service, then retried elsewhere | refuses the router's own keys |
| 403 | is retried elsewhere | refuses the router's own key |
| 502, 504 | is retried elsewhere | is unreachable behind its proxy, unless a second one returns the same status |
| 500, and all above 504 | is retried elsewhere, then answered | is at fault if another replica can answer |
| all others | is answered | is healthy |

An error may be the fault of the request or of the replica; `resilience.fault_attribution` finds out which.
"""

from __future__ import annotations

import re

from argosy_protocol.headers import RESOURCE_BUSY
from argosy_router.http.upstream_errors import UpstreamError

CONSECUTIVE_ERRORS = 5
"""Responses of 500 in a row, to requests that other replicas could answer, before ejection; Envoy's default."""
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
"""OpenAI's SDKs ignore a longer hint."""

_BUSY = frozenset((429, 503))
_KEY_REFUSED = frozenset((401, 403))
_GATEWAY = frozenset((502, 504))
_RETRYABLE = _BUSY | _KEY_REFUSED | _GATEWAY
_RESOURCE_BUSY = re.compile(rb"^%b:" % RESOURCE_BUSY.encode(), re.IGNORECASE | re.MULTILINE)
_RETRY_AFTER = re.compile(rb"^retry-after:\s*(\d{1,9})\s*$", re.IGNORECASE | re.MULTILINE)


class Refused(UpstreamError):
    """The replica responded, but another one should answer the request."""

    reason = "refused"

    def __init__(self, status: int, head: bytes = b"", *, is_resource_busy: bool = False) -> None:
        """
        Args:
            head: the response's header lines.
            is_resource_busy: an event said what the header `RESOURCE_BUSY` says.
        """
        super().__init__(f"status {status}")
        self.status = status
        self._head = head
        self.is_resource_busy = is_resource_busy or _RESOURCE_BUSY.search(head) is not None
        """Whether the replica is full for requests like this one only."""

    @property
    def is_busy(self) -> bool:
        """Whether the replica says that it is full, perhaps only for requests like this one, or shutting down."""
        return self.status in _BUSY

    @property
    def is_ambiguous(self) -> bool:
        """Whether the request may be at fault as well as the replica."""
        return self.status in _GATEWAY or is_error(self.status)

    @property
    def retry_after_s(self) -> float:
        """When the replica wants to be asked again, within what clients heed."""
        hint = _RETRY_AFTER.search(self._head)
        if hint is None:
            return DEFAULT_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(DEFAULT_RETRY_AFTER_S, float(hint[1])))


class EngineError(Refused):
    """The replica responded with an error of its own, which the client gets if no other replica does better."""

    reason = "status"

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        super().__init__(status, head)
        self.head = head
        self.body = body


class OversizedEvent(Refused):
    """The replica sent an event of a stream that is too large to hold. It counts as a bad gateway: the request may be
    the cause."""

    reason = "malformed"

    def __init__(self) -> None:
        super().__init__(502)

    def __str__(self) -> str:
        return "an event is too large"


def refusal(status: int, head: bytes = b"") -> Refused | None:
    """Return the refusal that a response with this status stands for; None if it is the client's answer."""
    return Refused(status, head) if status in _RETRYABLE else None


def is_error(status: int) -> bool:
    """Whether the response is an error of the engine's own."""
    return status == 500 or status > 504


def is_key_refused(error: UpstreamError) -> bool:
    """Whether the replica did not know the router's key, and may know another one of its service."""
    return isinstance(error, Refused) and error.status == 401


def is_fault(status: int) -> bool:
    """Whether the response counts against the replica, unless it turns out to be the request's fault."""
    return is_error(status) or status in _KEY_REFUSED or status in _GATEWAY

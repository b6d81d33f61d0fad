"""What the status of an answer says, about the request and about the replica.

Owns: that table. Must not know: retries, how ejection works.

| status | the request | the replica |
|---|---|---|
| 429, 503 | goes elsewhere | is full, or leaving: not at fault, but rests as long as it says |
| 401, 403 | goes elsewhere | refuses the router's own key |
| 502, 504 | goes elsewhere | is not reached by what stands before it, unless another replica fails alike |
| 500, and all above 504 | goes elsewhere, is answered if that fails alike | is at fault if another can answer |
| all others | is answered | is well |

An error may be the request's fault or the replica's: `Suspects` remembers who failed the request until that is known.
If another replica fails it with the same status, it is the request's, which is then tried no more and counts against
nobody; if another one can answer it, it was the replica's. Where no other one can be asked it stays open.
"""

from __future__ import annotations

import re

from argosy_router.fleet.replica import Replica
from argosy_router.http.errors import UpstreamError

CONSECUTIVE_ERRORS = 5
"""Answers of 500 in a row, to requests that others could answer, before ejection, as Envoy counts them."""
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
"""OpenAI's SDKs ignore a longer hint."""

_BUSY = frozenset((429, 503))
_KEY_REFUSED = frozenset((401, 403))
_GATEWAY = frozenset((502, 504))
_ELSEWHERE = _BUSY | _KEY_REFUSED | _GATEWAY
_RETRY_AFTER = re.compile(rb"^retry-after:\s*(\d{1,9})\s*$", re.IGNORECASE | re.MULTILINE)


class Refused(UpstreamError):
    """The replica answered, but another one should."""

    reason = "refused"

    def __init__(self, status: int, head: bytes = b"") -> None:
        """`head` is the answer's header lines."""
        super().__init__(f"status {status}")
        self.status = status
        self._head = head

    @property
    def is_busy(self) -> bool:
        return self.status in _BUSY

    @property
    def is_open(self) -> bool:
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
    """The replica answered with an error of its own, which the client gets if no other replica does better."""

    reason = "status"

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        super().__init__(status, head)
        self.head = head
        self.body = body


class Suspects:
    """Replicas that answered one request with an error."""

    __slots__ = ("_failed", "is_request_at_fault")

    def __init__(self) -> None:
        self._failed: list[tuple[Replica, int]] = []
        self.is_request_at_fault = False
        """Whether two replicas failed it alike."""

    def add(self, replica: Replica, status: int) -> None:
        self.is_request_at_fault |= any(
            before == status and other is not replica for other, before in self._failed
        )
        self._failed.append((replica, status))

    def take(self) -> list[tuple[Replica, int]]:
        """All of them and their status; then there are none."""
        failed, self._failed = self._failed, []
        return failed


def refusal(status: int, head: bytes = b"") -> Refused | None:
    """The refusal that an answer with this status is; None if it is the client's answer."""
    return Refused(status, head) if status in _ELSEWHERE else None


def is_error(status: int) -> bool:
    """Whether the answer is an error of the engine's own."""
    return status == 500 or status > 504


def is_fault(status: int) -> bool:
    """Whether the answer counts against the replica, unless it turns out to be the request's fault."""
    return is_error(status) or status in _KEY_REFUSED or status in _GATEWAY

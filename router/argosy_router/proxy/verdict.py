"""What the status of an answer says, about the request and about the replica.

Owns: that table. Must not know: retries, how ejection works.

| status | the request | the replica |
|---|---|---|
| 429, 503 | goes elsewhere | is full, or leaving: not at fault, but rests as long as it says |
| 401, 403 | goes elsewhere | refuses the router's own key |
| 502, 504 | goes elsewhere | is not reached by what stands before it |
| 500, and all above 504 | is answered | may have been upset by this one request; in a row they are the replica's |
| all others | is answered | is well |
"""

from __future__ import annotations

import re

from argosy_router.http.errors import UpstreamError

CONSECUTIVE_ERRORS = 5
"""Answers of 500 in a row before ejection, as Envoy counts them: more than of gateway failures, because one client's
requests can each end in an error where all others' are served."""
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
    def retry_after_s(self) -> float:
        """When the replica wants to be asked again, within what clients heed."""
        hint = _RETRY_AFTER.search(self._head)
        if hint is None:
            return DEFAULT_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(DEFAULT_RETRY_AFTER_S, float(hint[1])))


def refusal(status: int, head: bytes = b"") -> Refused | None:
    """The refusal that an answer with this status is; None if it is the client's answer."""
    return Refused(status, head) if status in _ELSEWHERE else None


def is_fault(status: int) -> bool:
    """Whether the answer counts against the replica."""
    return status == 500 or status > 504 or status in _KEY_REFUSED or status in _GATEWAY

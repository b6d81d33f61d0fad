"""The operator's errors. Each carries the condition reason that it is reported under.

OperatorError
├── ApiError          the API server refused or did not answer; retried with back-off
├── ChildNotOwned     an object with a child's name has another owner; a person must rename one of the two
└── SecretReserved    a service names a Secret that an operator has made; its author must remove it

HistoryLost           the cluster's state was replaced by an earlier one; the process ends
"""

from __future__ import annotations

from typing import ClassVar


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

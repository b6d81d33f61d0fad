"""Errors of the operator's own work.

OperatorError
├── ApiError          the API server refused or did not answer; tried again with back-off
└── ChildNotOwned     an object with a child's name belongs to somebody else; a person must rename one of them

Each carries the condition reason it is reported under.
"""

from __future__ import annotations

from typing import ClassVar


class OperatorError(Exception):
    """Base of the tree."""

    reason: ClassVar[str] = "ReconcileError"


class ApiError(OperatorError):
    """A request to the API server failed. `status` is 0 when there was no answer."""

    reason = "ApiError"

    def __init__(self, action: str, status: int, message: str) -> None:
        super().__init__(f"{action}: {status or 'no answer'}: {message[:512]}")
        self.action = action
        self.status = status
        self.message = message


class ChildNotOwned(OperatorError):
    """The operator never takes over an object that it did not make."""

    reason = "ChildNotOwned"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name!r} exists and belongs to somebody else; delete it, or rename the InferenceService"
        )

"""A condition as it is decided, before it gets its times."""

from __future__ import annotations

from msgspec import Struct

from argosy_resource.types import ConditionStatus


class ConditionState(Struct, frozen=True):
    """A condition without its times."""

    status: ConditionStatus
    reason: str
    message: str = ""

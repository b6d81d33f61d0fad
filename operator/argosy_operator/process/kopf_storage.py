"""Storages that keep nothing, so that kopf never writes to an object.

kopf asks a diff-base storage and a progress storage on every event. Its own copy each object twice per event, and
write annotations; the operator is level-based and needs neither. Invariant: no method touches a patch.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Keep no last-seen state: every object looks the same to kopf, so it never has a difference to handle."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return {}

    def store(self, **_: Any) -> None:
        pass


class NoProgress(kopf.ProgressStorage):
    """Keep no progress of handlers: event handlers run once and do not fail."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        pass

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: Any) -> Any:
        return essence

"""kopf without memory: it keeps no diff base and no progress, neither on our objects nor at all.

Owns the two storages kopf asks for on every event. By default kopf copies each object twice per event and would
write annotations as soon as a handler needed them; the operator is level-based and needs neither.
Invariant: nothing in here touches a patch, so kopf can never write to an object.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """Every object looks the same to kopf, so there is never a difference to handle."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return {}

    def store(self, **_: Any) -> None:
        pass


class NoProgress(kopf.ProgressStorage):
    """Event handlers have no progress to keep: they run once and do not fail."""

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

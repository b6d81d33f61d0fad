"""The bearer key that the router sends to a replica, while the fleet key is rotated.

Owns: which of a service's keys a replica gets. Must not know: how keys are derived, requests, connections.
Invariants: a replica gets the key that it accepted last, even one that the service has no more; after a refusal the
next one is tried, each once per request. A newer key is used once the replica has accepted it (`key_probe`), so that
gateways, which cannot try again, are given one that works.
"""

from __future__ import annotations

from collections.abc import Collection


class ServiceKeys:
    """The keys of a service's engines, newest first; empty if they require none."""

    __slots__ = ("_keys",)

    def __init__(self, *keys: str) -> None:
        self._keys: tuple[str, ...] = tuple(key for key in keys if key)

    @property
    def all(self) -> tuple[str, ...]:
        return self._keys

    @property
    def newest(self) -> str:
        """The newest key; empty for none."""
        return self._keys[0] if self._keys else ""

    def replace(self, keys: tuple[str, ...]) -> None:
        self._keys = keys


class ReplicaKey:
    """The key of one replica."""

    __slots__ = ("_service", "current", "is_refused")

    def __init__(self, service: ServiceKeys) -> None:
        self._service = service
        self.current = service.newest
        """The key to send; empty for none."""
        self.is_refused = False
        """Whether the replica refused every key when it was last asked for telemetry."""

    @property
    def newest(self) -> str:
        """The service's newest key; empty for none."""
        return self._service.newest

    @property
    def is_newest(self) -> bool:
        return self.current == self._service.newest

    def refused(self, key: str, tried: Collection[str]) -> bool:
        """Note that the replica refused `key`. Returns whether `current` is one to try now.

        Args:
            tried: keys that the request was sent with, `key` included.
        """
        if self.current == key:
            keys = self._service.all
            position = keys.index(key) + 1 if key in keys else 0
            if not keys:
                return False
            self.current = keys[position % len(keys)]
        return self.current not in tried

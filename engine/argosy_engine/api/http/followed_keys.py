"""FollowedKeys: the accepted bearer keys of an engine, some of them from a file that may change while it serves.

Owns: when the file is read again. Must not know: requests, paths.
Invariants: a change interrupts no request, and all keys of the file are valid at once, so that a key can be replaced
while its users still have the old one; an engine with a key file always requires a key, whatever happens to the file.
With `linger_s` a key stays valid for that long after it has left the file, also if the file cannot be read.

The file is a Secret's, mounted as a directory: the kubelet replaces it as a whole. It is looked at when a request
comes, once a second at most, so that a change needs no task of its own and costs nothing at rest. A key has left it
when the file was written, also if nobody asked for hours.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from argosy_protocol.bearer_keys import KeyRing

logger = logging.getLogger("argosy.api")

MAX_FILE_BYTES = 64 * 1024
LOOK_EVERY_S = 1.0
MAX_LINGERING = 4
"""Keys that have left the file and are still accepted; the ones that left first are refused first."""


class FollowedKeys(KeyRing):
    """
    Args:
        keys: keys that are always accepted.
        path: file with a key per line; empty lines and lines that begin with `#` are ignored.
        clock: seconds that never go back.
        linger_s: how long a key is accepted that has left the file, in seconds; 0 if it is refused at once.
        name: what the file is called in logs.
    """

    def __init__(
        self,
        keys: Iterable[str],
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        linger_s: float = 0.0,
        name: str = "--api-keys-file",
    ) -> None:
        self._fixed = tuple(keys)
        self._path = path
        self._clock = clock
        self._linger_s = linger_s
        self._name = name
        self._found: tuple[str, ...] = ()
        """The keys of the file."""
        self._left: dict[str, float] = {}
        """Keys that have left the file and still count, and when they left; in this order."""
        self._content: bytes | None = None
        self._problem = ""
        """Why no key of the file is accepted, as last logged; empty if keys are."""
        super().__init__(self._fixed)
        self._read()

    def __bool__(self) -> bool:
        return True

    @property
    def found(self) -> tuple[str, ...]:
        """The keys of the file, in its order."""
        return self._found

    def accepts(self, authorization: str | None) -> bool:
        if self._clock() >= self._next_look:
            self._read()
        return super().accepts(authorization)

    def _read(self) -> None:
        """Read the file, and accept its keys from now on if it has changed."""
        self._next_look = self._clock() + LOOK_EVERY_S
        content, problem, age_s = b"", "", 0.0
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
                age_s = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            lines = [line.strip() for line in content.decode().splitlines()]
        except (OSError, ValueError) as error:
            content, lines, problem = b"", [], f"cannot be read: {error}"
        found = [line for line in lines if line and not line.startswith("#")]
        if not found and not problem:
            problem = f"has no key: {self._path}"
        if problem and problem != self._problem:
            logger.error("no key of %s is accepted: the file %s", self._name, problem)
        self._problem = problem
        if content != self._content:
            if self._content is not None:
                logger.info("%s has changed and has %d keys now", self._name, len(found))
            self._content = content
            self._take(tuple(found), self._clock() - age_s)
        if self._left and self._expire():
            self._accept()

    def _take(self, found: tuple[str, ...], since: float) -> None:
        """Accept the keys of the file, and for a while those that have left it. Nobody may have looked since the file
        was written, at `since`."""
        if self._linger_s:
            self._left |= {key: since for key in self._found if key not in found}
        for key in found:
            self._left.pop(key, None)
        while len(self._left) > MAX_LINGERING:
            del self._left[next(iter(self._left))]
        self._found = found
        self._accept()

    def _expire(self) -> bool:
        """Drop the keys that have lingered for long enough. Returns whether there were any."""
        now = self._clock()
        gone = [key for key, left in self._left.items() if now - left >= self._linger_s]
        for key in gone:
            del self._left[key]
        return bool(gone)

    def _accept(self) -> None:
        self.replace((*self._fixed, *self._found, *self._left))

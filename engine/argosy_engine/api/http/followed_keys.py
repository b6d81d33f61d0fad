"""FollowedKeys: the accepted bearer keys of an engine, some of them from a file that may change while it serves.

Owns: when the file is read again. Must not know: requests, paths.
Invariants: a change interrupts no request, and all keys of the file are valid at once, so that a key can be replaced
while its users still have the old one; an engine with a key file always requires a key, whatever happens to the file.

The file is a Secret's, mounted as a directory: the kubelet replaces it as a whole. It is looked at when a request
comes, once a second at most, so that a change needs no task of its own and costs nothing at rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from argosy_protocol.bearer_keys import KeyRing

logger = logging.getLogger("argosy.api")

MAX_FILE_BYTES = 64 * 1024
LOOK_EVERY_S = 1.0


class FollowedKeys(KeyRing):
    """
    Args:
        keys: keys that are always accepted.
        path: file with a key per line; empty lines and lines that begin with `#` are ignored.
        clock: seconds that never go back.
    """

    def __init__(self, keys: Iterable[str], path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._fixed = tuple(keys)
        self._path = path
        self._clock = clock
        self._content: bytes | None = None
        self._problem = ""
        """Why no key of the file is accepted, as last logged; empty if keys are."""
        super().__init__(self._fixed)
        self._read()

    def __bool__(self) -> bool:
        return True

    def accepts(self, authorization: str | None) -> bool:
        if self._clock() >= self._next_look:
            self._read()
        return super().accepts(authorization)

    def _read(self) -> None:
        """Read the file, and accept its keys from now on if it has changed."""
        self._next_look = self._clock() + LOOK_EVERY_S
        content, problem = b"", ""
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            lines = [line.strip() for line in content.decode().splitlines()]
        except (OSError, ValueError) as error:
            content, lines, problem = b"", [], f"cannot be read: {error}"
        found = [line for line in lines if line and not line.startswith("#")]
        if not found and not problem:
            problem = f"has no key: {self._path}"
        if problem and problem != self._problem:
            logger.error("no key of --api-keys-file is accepted: the file %s", problem)
        self._problem = problem
        if content != self._content:
            if self._content is not None:
                logger.info("--api-keys-file has changed and has %d keys now", len(found))
            self._content = content
            super().__init__((*self._fixed, *found))

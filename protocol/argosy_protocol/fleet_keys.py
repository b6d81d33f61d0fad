"""The fleet keys that are valid now: one, or several while the fleet key is rotated.

The Secret is mounted as a directory: its file `key` has the key, and `previous`, which may be missing, the one before.
The bytes count as they are, line ends included.

Invariants: while the files cannot be read, or hold no usable key, the keys stay as they were; a key that has left the
files stays valid for `LINGER_S`, because the other programs of the installation see the change at another time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

KEY_FIELD: Final = "key"
PREVIOUS_FIELD: Final = "previous"
MIN_KEY_BYTES: Final = 16
MAX_KEY_BYTES: Final = 4096
LINGER_S: Final = 600.0
"""Seconds. Several times as long as a kubelet takes to update a mounted Secret: two minutes, by period and cache."""
LOOK_EVERY_S: Final = 1.0
"""Suggested pause between two looks at the files; a look costs two reads of a file system in memory."""
MAX_LINGERING: Final = 4
"""Keys that have left the files and still count; the ones that left first are dropped."""


class FleetKeys:
    """The keys, newest first.

    Args:
        fixed: the key as long as the files have none; empty for none.
        directory: the mounted Secret; None if `fixed` is all there is.
        clock: seconds that never go back.
    """

    def __init__(
        self, fixed: bytes = b"", directory: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._given: tuple[bytes, ...] = (fixed,) if fixed else ()
        """The keys of the files, the newest first."""
        self._has_been_there = False
        self._left: dict[bytes, float] = {}
        """Keys that have left the files, and when; in this order."""
        self._problem = ""
        """Why the files are not heeded, as last logged; empty if they are."""
        self._given_before: tuple[bytes, ...] = self._given
        """Those at the last look."""
        self._lingering: tuple[bytes, ...] = ()
        self.look()

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The valid keys, newest first; empty if there is none."""
        return (*self._given, *self._lingering)

    @property
    def lingering(self) -> tuple[bytes, ...]:
        """Those that have left the files, newest first."""
        return self._lingering

    @property
    def given(self) -> tuple[bytes, ...]:
        """The keys that the files had when they were last read: the current one and, perhaps, the one before."""
        return self._given

    @property
    def problem(self) -> str:
        """Why the files could not be read at the last look; empty if they could."""
        return self._problem

    def look(self) -> bool:
        """Read the files again. Returns whether the valid keys have changed, or which of them linger."""
        now = self._clock()
        if self._directory is not None:
            self._read(self._directory, now)
        for key in [key for key, left in self._left.items() if now - left >= LINGER_S]:
            del self._left[key]
        keys = (self._given, tuple(reversed(self._left)))
        is_changed = keys != (self._given_before, self._lingering)
        self._given_before, self._lingering = keys
        return is_changed

    def _read(self, directory: Path, now: float) -> None:
        problem = ""
        try:
            given = [_read_key(directory / KEY_FIELD)]
        except FileNotFoundError as error:
            # A first installation has none until the operator has created the Secret and the kubelet has mounted it.
            self._note(
                f"{directory / KEY_FIELD}: {error}", logging.ERROR if self._has_been_there else logging.INFO
            )
            return
        except (OSError, ValueError) as error:
            self._note(f"{directory / KEY_FIELD}: {error}")
            return
        self._has_been_there = True
        try:
            previous = _read_key(directory / PREVIOUS_FIELD)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            problem = f"{directory / PREVIOUS_FIELD}: {error}"
        else:
            given += [previous] if previous != given[0] else []
        self._note(problem)
        if tuple(given) == self._given:
            return
        for key in self._given:
            if key not in given:
                self._left[key] = now
        for key in given:
            self._left.pop(key, None)
        while len(self._left) > MAX_LINGERING:
            del self._left[next(iter(self._left))]
        if self._given:
            logger.info("the fleet key's Secret has changed; it has %d keys now", len(given))
        self._given = tuple(given)

    def _note(self, problem: str, level: int = logging.ERROR) -> None:
        """Log a problem once."""
        if problem and problem != self._problem:
            what = (
                "a file of the fleet key is not heeded"
                if level == logging.ERROR
                else "there is no fleet key yet"
            )
            logger.log(level, "%s: %s", what, problem)
        self._problem = problem


def _read_key(path: Path) -> bytes:
    """
    Raises:
        OSError: the file cannot be read.
        ValueError: its size is out of bounds.
    """
    with path.open("rb") as file:
        key = file.read(MAX_KEY_BYTES + 1)
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a fleet key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    return key

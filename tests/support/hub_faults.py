"""Faults of the hub look-alike: what goes wrong with which of its requests, in the order in which they come."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["list", "resolve", "content", "other"]
"""A request for a list of files, for a file, for the content to which the hub redirects for a file, or for a page that
is not there."""


class Hold:
    """Stops a body after some bytes until the test releases it."""

    def __init__(self, after_bytes: int = 0) -> None:
        self.after_bytes = after_bytes
        self.reached = threading.Event()
        self.release = threading.Event()


@dataclass(frozen=True)
class Fault:
    """What is different about one answer.

    Attributes:
        status: answer with this status and no content.
        headers: headers to add or to replace; an empty value removes one.
        body: content to send instead, of the same or another length.
        cut_after: close the connection after so many bytes of the body.
        flip_at: change the byte at this offset in the file.
        hold: stop the body until the test releases it.
        pieces_of: send the body in segments of so many bytes.
        ignores_range: answer with the whole file.
        moves_range_by: answer with a range that starts so many bytes later.
        drops: close the connection without an answer.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cut_after: int | None = None
    flip_at: int | None = None
    hold: Hold | None = None
    pieces_of: int = 0
    ignores_range: bool = False
    moves_range_by: int = 0
    drops: bool = False


NO_FAULT = Fault()


class FaultScript:
    """Faults to come. Each applies to the next requests of its kind whose path matches, and then is used up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Kind, str, int, int, Fault]] = []

    def add(self, kind: Kind, fault: Fault, *, path: str = "*", after: int = 0, times: int = 1) -> None:
        """
        Args:
            path: pattern of a file's path, or of a repository's name if the kind is `list`.
            after: matching requests to let pass first.
        """
        with self._lock:
            self._waiting.append((kind, path, after, times, fault))

    def next(self, kind: Kind, path: str) -> Fault:
        with self._lock:
            for index, (wanted, pattern, after, times, fault) in enumerate(self._waiting):
                if wanted != kind or not fnmatchcase(path, pattern):
                    continue
                if after:
                    self._waiting[index] = (wanted, pattern, after - 1, times, fault)
                    continue
                if times == 1:
                    del self._waiting[index]
                else:
                    self._waiting[index] = (wanted, pattern, 0, times - 1, fault)
                return fault
        return NO_FAULT

    @property
    def is_used_up(self) -> bool:
        with self._lock:
            return not self._waiting

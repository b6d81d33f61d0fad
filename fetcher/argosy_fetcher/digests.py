"""Digests: hash functions by the names that snapshots use."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Final, Protocol

from argosy_fetcher.snapshot import Algorithm, Digest

HEX_DIGITS: Final[Mapping[Algorithm, int]] = {"sha256": 64, "git-sha1": 40, "md5": 32}
_READ_BYTES: Final = 1 << 20
"""Small enough for a core's own cache: the hash then reads what the kernel has just copied there."""


class Hasher(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_hasher(digest: Digest, size: int) -> Hasher:
    """Return a hasher of content of `size` bytes that the digest is compared with."""
    if digest.algorithm == "sha256":
        return hashlib.sha256()
    if digest.algorithm == "md5":
        return hashlib.md5(usedforsecurity=False)
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def matches(data: bytes, digest: Digest | None) -> bool:
    """Whether content has the digest; without one, nothing contradicts it."""
    if digest is None:
        return True
    hasher = new_hasher(digest, len(data))
    hasher.update(data)
    return hasher.hexdigest() == digest.hex


def hash_range(hasher: Hasher, descriptor: int, start: int, stop: int) -> None:
    """Add the bytes [start, stop) of an open file.

    Raises:
        OSError: the file ends before `stop`, or cannot be read.
    """
    buffer = memoryview(bytearray(min(_READ_BYTES, max(stop - start, 1))))
    while start < stop:
        count = os.preadv(descriptor, [buffer[: min(len(buffer), stop - start)]], start)
        if not count:
            raise OSError("the file was truncated by another program")
        hasher.update(buffer[:count])
        start += count

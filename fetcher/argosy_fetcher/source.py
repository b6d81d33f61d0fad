"""Source: the interface between the fetcher and a place where models are kept, and what such a place tells of a model.

A source knows addresses, credentials and protocols. It must not know the store, the selection of files, retries or
progress. To add one, write a module with a class of this shape and name it in `sources.registry`. A `Snapshot` is what
it holds at one immutable revision, as a list of files with sizes and digests.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Struct

from argosy_fetcher.errors import UnsupportedModel

MAX_FILES = 10_000
MAX_PATH_BYTES = 512
MAX_FILE_BYTES = 1 << 44

Algorithm = Literal["sha256", "md5", "git-sha1"]
"""`git-sha1` is git's blob id: SHA-1 over `blob SIZE\\0` and the content."""
Packing = Literal["none", "tar", "tar+gzip", "tar+zstd"]


class Digest(Struct, frozen=True):
    """Digest of a file's content, which the content is checked against."""

    algorithm: Algorithm
    hex: Annotated[str, Meta(pattern="^[0-9a-f]{32,64}$")]


class RemoteFile(Struct, frozen=True):
    """One file of a snapshot."""

    path: str
    """Where it goes, relative to the model's directory; checked by `check_path`."""
    size: Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]
    """Bytes to transfer."""
    digest: Digest | None = None
    """None if the source announces none; then only the size is checked."""
    version: str = ""
    """What the source needs to read exactly this content: an ETag, a version id, a blob's digest. Opaque to others."""
    packing: Packing = "none"
    """How the content is packed. Packed files are unpacked into the model's directory and then deleted."""
    folders: tuple[str, ...] = ()
    """Folders inside a packed file in which the model is looked for, in this order; the empty name is the top folder.
    Of all packed files of a snapshot together, the first folder with a config.json is the model's, and files elsewhere
    are not unpacked. Empty if nothing is known of the folder: then it is the uppermost with a config.json."""


class Snapshot(Struct, frozen=True):
    """All files of a source at one revision."""

    source: str
    """Canonical URI without a revision, such as `hf://Qwen/Qwen3-0.6B`."""
    revision: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Immutable: a commit, a manifest's digest, or a hash over names, sizes and versions of the files."""
    files: tuple[RemoteFile, ...]

    def file(self, path: str) -> RemoteFile | None:
        """Return the file with this path, or None."""
        return next((file for file in self.files if file.path == path), None)


def check_path(path: str) -> str:
    """Return the path of a file of a model if it is safe.

    Raises:
        UnsupportedModel: it is absolute, empty or too long, has `..`, a backslash, control characters or a part that
            the store uses for itself.
    """
    parts = path.split("/")
    is_safe = (
        all(map(_is_visible, path))
        and 0 < len(path.encode()) <= MAX_PATH_BYTES
        and "\\" not in path
        and all(part not in ("", ".", "..") and not part.startswith(".argosy") for part in parts)
    )
    if not is_safe:
        raise UnsupportedModel(f"the model has a file with an unsafe name: {path[:200]!r}")
    return path


def _is_visible(character: str) -> bool:
    """Whether a character has a glyph or is a space, of which macOS puts unusual ones into the names of screenshots."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def encode_snapshot(snapshot: Snapshot) -> bytes:
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=1)


Chunk: TypeAlias = bytes | memoryview


class Source(Protocol):
    """One model at one place. `read` is called from several threads at once."""

    @property
    def name(self) -> str:
        """Canonical URI without revision and credentials; the store's directory is derived from it."""
        ...

    @property
    def requested_revision(self) -> str:
        """The revision that the user asked for, such as a branch, a tag or a commit; empty if none."""
        ...

    def snapshot(self) -> Snapshot:
        """Resolve the revision and list the files. Not thread-safe; called before `read`.

        Raises:
            FetchError: the most specific class that applies.
            TransientError: another attempt may succeed.
        """
        ...

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        """Yield the bytes [start, stop) of a file in order, in chunks of any size.

        The iterator may end early or raise; the caller then continues from what it has received. It must not yield
        anything else than these bytes: a source that cannot read ranges yields nothing before `start`.

        Raises:
            SourceChanged: the content is not that of the snapshot any more.
            FetchError, TransientError: as `snapshot`.
        """
        ...

    def close(self) -> None: ...


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

"""Snapshot: what a source holds at one immutable revision, as a list of files with sizes and digests."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_fetcher.errors import UnsupportedModel

MAX_FILES = 10_000
MAX_PATH_BYTES = 512
MAX_FILE_BYTES = 1 << 44

Algorithm = Literal["sha256", "md5", "git-sha1"]
"""`git-sha1` is git's blob id: SHA-1 over `blob SIZE\\0` and the content."""
Packing = Literal["none", "tar", "tar+gzip", "tar+zstd", "zip"]


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

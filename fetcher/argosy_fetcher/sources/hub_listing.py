"""Hub listing: a hub's answer about a model at one revision, as the files of a snapshot.

Owns its types and bounds. Must not know requests. Digests are the SHA-256 of files in LFS and git's blob id of others.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, field

from argosy_fetcher.snapshot import MAX_FILE_BYTES, MAX_FILES, Digest, RemoteFile, check_path
from argosy_fetcher.sources.documents import MalformedDocument, decode_document

MAX_LISTING_BYTES: Final = 32 << 20
"""Ten times what the hub says about `MAX_FILES` files."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GIT_SHA1: Final = re.compile(r"[0-9a-f]{40}")

FileSize = Annotated[int, Meta(ge=0, le=MAX_FILE_BYTES)]


class LfsFile(Struct, frozen=True):
    """Content that is kept outside of git."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: FileSize


class ListedFile(Struct, frozen=True):
    """One file of a repository; mirrors do not give all of them a blob id."""

    rfilename: str
    size: FileSize | None = None
    blob_id: Any = field(name="blobId", default=None)
    lfs: LfsFile | None = None


class HubListing(Struct, frozen=True):
    """The fields of the answer that are read."""

    id: str
    sha: str | None = None
    siblings: list[ListedFile] | None = None


def decode_listing(content: bytes, revision: str) -> tuple[str, tuple[RemoteFile, ...]]:
    """Return the commit and its files.

    Args:
        revision: the one that was asked for; empty if none.

    Raises:
        MalformedDocument: the content is no listing, of another commit, or exceeds a bound.
        UnsupportedModel: a path is unsafe.
    """
    listing = decode_document(content, HubListing)
    commit, siblings = listing.sha or "", listing.siblings or []
    if not _COMMIT.fullmatch(commit):
        raise MalformedDocument("it names no commit")
    if _COMMIT.fullmatch(revision) and revision != commit:
        raise MalformedDocument(f"it is for commit {commit}")
    if len(siblings) > MAX_FILES:
        raise MalformedDocument(f"it lists {len(siblings)} files; the limit is {MAX_FILES}")
    files = tuple(_remote_file(sibling) for sibling in siblings)
    if len({file.path for file in files}) != len(files):
        raise MalformedDocument("it lists a file twice")
    return commit, files


def _remote_file(listed: ListedFile) -> RemoteFile:
    path = check_path(listed.rfilename)
    if listed.lfs is not None:
        sha256 = listed.lfs.sha256
        return RemoteFile(path, listed.lfs.size, Digest("sha256", sha256), sha256)
    if listed.size is None:
        raise MalformedDocument(f"it does not say how large {path[:200]!r} is")
    if isinstance(listed.blob_id, str) and _GIT_SHA1.fullmatch(listed.blob_id):
        return RemoteFile(path, listed.size, Digest("git-sha1", listed.blob_id), listed.blob_id)
    return RemoteFile(path, listed.size)

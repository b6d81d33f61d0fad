"""What is stored and shown of a file, and pages of lists.

Owns: the types, and the rules of names. Must not know: HTTP, the storage.
"""

from __future__ import annotations

from typing import Annotated, Final, Generic, Literal, TypeVar

from msgspec import Meta, Struct

from argosy_protocol import object_ids
from argosy_protocol.errors import NotFound

KIND: Final = "files"
ID_PREFIX: Final = "file-"
MAX_NAME: Final = 255
MAX_LISTED: Final = 10_000
"""OpenAI's bound of `limit`. A page has fewer files all the same."""
MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 30 * 86400
T = TypeVar("T")

Purpose = Literal["batch", "batch_output"]


class Page(Struct, Generic[T], frozen=True, kw_only=True):
    """One page of a list, as OpenAI's."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file's document. Its content is kept beside it."""

    id: Annotated[str, Meta(max_length=128)]
    filename: Annotated[str, Meta(max_length=MAX_NAME)]
    purpose: Purpose
    bytes: Annotated[int, Meta(ge=0)]


class FileObject(Struct, frozen=True, kw_only=True):
    """A file, as OpenAI's API shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(Struct, frozen=True, kw_only=True):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def shown(file: StoredFile) -> FileObject:
    """Return what clients see of a file."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=int(object_ids.created_at(file.id)),
        expires_at=object_ids.expires_at(file.id),
        filename=file.filename,
        purpose=file.purpose,
    )


def plain_name(sent: str) -> str:
    """Return a client's file name without folders and control characters; it is shown, and never names a path."""
    last = sent.replace("\\", "/").rpartition("/")[2]
    name = "".join(character for character in last if character.isprintable()).strip()
    return name[:MAX_NAME] if name.strip(".") else "upload.jsonl"


def no_such_file(file_id: str) -> NotFound:
    return NotFound(f"no such File object: {file_id[:128]!r}", param="id")

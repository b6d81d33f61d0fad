"""What is stored and shown of a file.

Owns: the types, and the rules of names. Must not know: HTTP, the storage.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from argosy_protocol.errors import NotFound
from argosy_router.storage import object_ids

KIND: Final = "files"
ID_PREFIX: Final = "file-"
MAX_NAME: Final = 255

Purpose = Literal["batch", "batch_output"]


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

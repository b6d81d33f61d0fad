"""/v1/files: upload, list, retrieve, content, delete.

Owns: the checks of a form, and the files of keys. Must not know: connections, batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final, NamedTuple

import msgspec

from argosy_batch.file_upload import FileUpload
from argosy_batch.listing import in_order, limit_of, page_of
from argosy_batch.storage.object_store import ObjectStore
from argosy_protocol import file_objects
from argosy_protocol.errors import ApiError, BadRequest, StorageUnavailable
from argosy_protocol.file_objects import (
    MAX_EXPIRY_S,
    MAX_LISTED,
    MIN_EXPIRY_S,
    DeletedFile,
    FileObject,
    Page,
    Purpose,
    StoredFile,
    no_such_file,
)
from argosy_protocol.owner_slots import OwnerSlots

MAX_UPLOADS: Final = 64
"""Uploads at a time, each of which holds a megabyte. Owners share them (`OwnerSlots`)."""
PAGE: Final = 1000
"""Files of a page at most, whatever `limit` says."""
_KIND: Final = file_objects.KIND
_decoder: Final = msgspec.json.Decoder(StoredFile)


class FileContent(NamedTuple):
    """A file that is about to be sent."""

    file: StoredFile
    chunks: AsyncGenerator[bytes, None]


class FilesApi:
    """The files of all keys."""

    def __init__(self, store: ObjectStore, *, max_file_bytes: int, ttl_s: float) -> None:
        """`ttl_s` is how long a file lives whose upload does not say."""
        self._store = store
        self._max_file_bytes = max_file_bytes
        self._ttl_s = ttl_s
        self._uploads: set[FileUpload] = set()
        self._slots = OwnerSlots(MAX_UPLOADS)
        """Of uploads."""

    def begin(self, owner: str, boundary: bytes, declared_bytes: int) -> FileUpload:
        """Begin an upload, which gets the body.

        Args:
            declared_bytes: size of the body as its head says; zero if it does not.

        Raises:
            PayloadTooLarge: the file must be too large.
            Unavailable: there are too many already, or the owner has.
        """
        upload = FileUpload(self._store, owner, self._new_id, boundary, self._max_file_bytes)
        if declared_bytes > upload.max_bytes:
            raise upload.too_large()
        if not self._slots.take(owner):
            raise self._slots.refusal(owner, "receives", "files")
        self._uploads.add(upload)
        upload.on_end = lambda: self._forget(upload, owner)
        return upload

    def _forget(self, upload: FileUpload, owner: str) -> None:
        """Free the upload's slot; called once."""
        self._uploads.remove(upload)
        self._slots.release(owner)

    def _new_id(self, fields: Mapping[str, str]) -> str:
        """Return the id of a file, which tells when it expires."""
        anchor = fields.get("expires_after[anchor]", "created_at")
        seconds = fields.get("expires_after[seconds]")
        if seconds is None:
            return self._store.new_id(file_objects.ID_PREFIX, self._ttl_s)
        if anchor != "created_at":
            raise BadRequest("expires_after.anchor must be created_at", param="expires_after")
        if not (seconds.isascii() and seconds.isdigit() and MIN_EXPIRY_S <= int(seconds[:9]) <= MAX_EXPIRY_S):
            raise BadRequest(
                f"expires_after.seconds must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param="expires_after"
            )
        return self._store.new_id(file_objects.ID_PREFIX, float(seconds[:9]))

    async def create(self, owner: str, upload: FileUpload) -> FileObject:
        """Store the file of a whole form.

        Raises:
            BadRequest: the form is not as documented.
            QuotaExceeded: the owner has too many objects or bytes by now.
        """
        size = await upload.finish()
        file = StoredFile(id=upload.object_id, filename=upload.filename, purpose="batch", bytes=size)
        try:
            _check_fields(upload.fields)
            await self.add(owner, file)
        except ApiError as error:
            # A document whose storing failed may be there all the same; a content without one is swept.
            if not isinstance(error, StorageUnavailable):
                await self._store.delete_content(_KIND, owner, upload.object_id)
            raise
        return file_objects.shown(file)

    async def add(self, owner: str, file: StoredFile, *, is_counted: bool = True) -> None:
        """Store the document of a file whose content is stored."""
        document = msgspec.json.encode(file)
        await self._store.create(_KIND, owner, file.id, document, is_counted=is_counted)

    async def find(self, owner: str, file_id: str) -> StoredFile | None:
        """Return a file; None if the owner has none of this id."""
        found = await self._store.read_as(_KIND, owner, file_id, _decoder.decode)
        return None if found is None else found[0]

    async def get(self, owner: str, file_id: str) -> FileObject:
        """Raises NotFound, as all that follow."""
        file = await self.find(owner, file_id)
        if file is None:
            raise no_such_file(file_id)
        return file_objects.shown(file)

    async def content(self, owner: str, file_id: str) -> FileContent:
        file = await self.find(owner, file_id)
        if file is None:
            raise no_such_file(file_id)
        return FileContent(file, self.chunks(owner, file_id))

    def chunks(self, owner: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file that exists."""
        return self._store.content(_KIND, owner, file_id)

    async def delete(self, owner: str, file_id: str) -> DeletedFile:
        if not await self._store.delete(_KIND, owner, file_id):
            raise no_such_file(file_id)
        return DeletedFile(id=file_id)

    async def list(self, owner: str, query: Mapping[str, str]) -> Page[FileObject]:
        """Return a page of the owner's files, the newest first unless the query says otherwise."""
        limit = limit_of(query, MAX_LISTED, MAX_LISTED)
        purpose = query.get("purpose")
        ids = in_order(await self._store.ids(_KIND, owner), query, file_objects.ID_PREFIX)

        async def read(file_id: str) -> FileObject | None:
            file = await self.find(owner, file_id)
            return None if file is None or purpose not in (None, file.purpose) else file_objects.shown(file)

        return await page_of(ids, min(limit, PAGE), read)

    async def close(self) -> None:
        """Abort the uploads that are not complete, and wait until all have ended."""
        uploads = list(self._uploads)
        for upload in uploads:
            upload.abort()
        await asyncio.gather(*(upload.ended() for upload in uploads))


def _check_fields(fields: Mapping[str, str]) -> None:
    known = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
    for name in fields:
        if name not in known:
            raise BadRequest(
                f"unknown field {name[:64]!r}; a form has file, {', '.join(known)}", param=name[:64]
            )
    given = fields.get("purpose")
    allowed: Purpose = "batch"
    if given != allowed:
        shown = "missing" if given is None else repr(given[:64])
        raise BadRequest(f"purpose must be 'batch', not {shown}: files are for batches only", param="purpose")

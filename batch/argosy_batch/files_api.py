"""/v1/files: upload, list, retrieve, content, delete; the forms in which files come, and pages of lists, as OpenAI's.

Owns: the parser of multipart/form-data (RFC 7578) with its limits on heads and their number, the checks of a form, a
form's file on its way to the storage, and the files of keys. Must not know: connections, batches.
Invariants: any split of the same bytes gives the same parts; at most a head or a delimiter is held. Of a file, at most
`MAX_HELD_BYTES` and one piece of the connection have arrived and not been written; it is stored once `finish` returns,
and not at all if that raises or is not called.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from argosy_batch.object_store import ObjectStore
from argosy_protocol import batch_program
from argosy_protocol.batch_program import (
    MAX_EXPIRY_S,
    MAX_LISTED_FILES,
    MIN_EXPIRY_S,
    DeletedFile,
    FileObject,
    Page,
    Purpose,
    StoredFile,
    no_such_file,
)
from argosy_protocol.errors import ApiError, BadRequest, PayloadTooLarge, StorageUnavailable
from argosy_protocol.program.process import OwnerSlots

T = TypeVar("T")
_READS_AT_ONCE: Final = 32


def limit_of(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Return how many objects a page has.

    Raises:
        BadRequest: `limit` is not a number from 1 to `maximum`.
    """
    given = query.get("limit")
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= maximum):
        raise BadRequest(f"limit must be a number from 1 to {maximum}", param="limit")
    return int(given[:9])


def in_order(ids: list[str], query: Mapping[str, str], prefix: str) -> list[str]:
    """Return ids, given oldest first, in the order and from the place that a query asks for.

    The object of `after` need not exist any more: a client may delete what it has listed before it asks for the next
    page.

    Args:
        prefix: what the ids of the list begin with.

    Raises:
        BadRequest: `order` is unknown, or `after` is not an id as the list has them.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc", param="order")
    if order == "desc":
        ids = ids[::-1]
    after = query.get("after")
    if after:
        if not (after.startswith(prefix) and batch_program.is_id(after)):
            raise BadRequest("after must be the id of an object of the list", param="after")
        place = batch_program.place_of(after)
        ids = [
            each
            for each in ids
            if (
                batch_program.place_of(each) > place
                if order == "asc"
                else batch_program.place_of(each) < place
            )
        ]
    return ids


async def page_of(ids: Sequence[str], limit: int, read: Callable[[str], Awaitable[T | None]]) -> Page[T]:
    """Return the first page of `ids`, without those for which `read` returns None."""
    found: list[tuple[str, T]] = []
    for start in range(0, len(ids), _READS_AT_ONCE):
        some = ids[start : start + _READS_AT_ONCE]
        results: Any = await asyncio.gather(*(read(each) for each in some))
        found += [(each, result) for each, result in zip(some, results, strict=True) if result is not None]
        if len(found) > limit:
            break
    page = found[:limit]
    return Page(
        data=[result for _, result in page],
        first_id=page[0][0] if page else None,
        last_id=page[-1][0] if page else None,
        has_more=len(found) > limit,
    )


MAX_HEAD_BYTES: Final = 8 * 1024
MAX_PARTS: Final = 32
MAX_BOUNDARY_BYTES: Final = 70
"""RFC 2046, 5.1.1."""
_BOUNDARY: Final = re.compile(rb';\s*boundary=(?:"([^"]+)"|([^;\s"]+))', re.IGNORECASE)
_PARAMETER: Final = re.compile(rb';\s*([A-Za-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))')


class PartListener(Protocol):
    """Receives the parts of a form, one after another. Each method may raise ApiError, which ends the parsing."""

    def on_part(self, name: str, filename: str | None) -> None:
        """A part begins; `filename` is as the client sent it, None if it sent none."""
        ...

    def on_part_data(self, data: bytes) -> None: ...

    def on_part_end(self) -> None: ...


class _State(Enum):
    PREAMBLE = "before the first part"
    DELIMITED = "right behind a delimiter"
    HEAD = "in a part's head"
    DATA = "in a part's data"
    END = "behind the last part"


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary that a content type declares.

    Raises:
        BadRequest: it is not multipart/form-data, or has no usable boundary.
    """
    if content_type.partition(b";")[0].strip().lower() != b"multipart/form-data":
        raise BadRequest("content-type must be multipart/form-data")
    match = _BOUNDARY.search(content_type)
    boundary = (match[1] or match[2]) if match is not None else b""
    if not 1 <= len(boundary) <= MAX_BOUNDARY_BYTES:
        raise BadRequest("multipart/form-data needs a boundary of 1 to 70 characters")
    return boundary


class MultipartParser:
    """Parses one body."""

    def __init__(self, boundary: bytes, listener: PartListener) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._listener = listener
        self._held = bytearray(b"\r\n")  # the first delimiter may begin the body
        self._state = _State.PREAMBLE
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last part has ended."""
        return self._state is _State.END

    def feed(self, data: bytes) -> None:
        """Parse more bytes.

        Raises:
            BadRequest: malformed, or out of bounds.
        """
        if self._state is _State.END:
            return
        self._held += data
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Parse what is held as far as one step goes; return whether another one may go further."""
        state = self._state
        if state is _State.PREAMBLE or state is _State.DATA:
            return self._find_delimiter()
        if state is _State.DELIMITED:
            return self._end_delimiter()
        return self._read_head() if state is _State.HEAD else False

    def _find_delimiter(self) -> bool:
        at = self._held.find(self._delimiter)
        end = at if at >= 0 else len(self._held) - len(self._delimiter) + 1
        if self._state is _State.DATA and end > 0:
            self._listener.on_part_data(bytes(self._held[:end]))
        if at < 0:
            if end > 0:
                del self._held[:end]
            return False
        del self._held[: at + len(self._delimiter)]
        if self._state is _State.DATA:
            self._listener.on_part_end()
        self._state = _State.DELIMITED
        return True

    def _end_delimiter(self) -> bool:
        held = self._held
        if len(held) < 2:
            return False
        if held.startswith(b"--"):
            self._state = _State.END
            held.clear()
            return False
        end = held.find(b"\r\n")
        if held[: max(0, end)].strip(b" \t") or (end < 0 and len(held) > MAX_BOUNDARY_BYTES):
            raise BadRequest("malformed multipart body: a line with a boundary has more than the boundary")
        if end < 0:
            return False
        del held[:end]  # the line break stays: a head may be empty
        self._state = _State.HEAD
        return True

    def _read_head(self) -> bool:
        end = self._held.find(b"\r\n\r\n")
        if max(end, 0) > MAX_HEAD_BYTES or (end < 0 and len(self._held) > MAX_HEAD_BYTES):
            raise BadRequest("malformed multipart body: the head of a part is too large")
        if end < 0:
            return False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequest(f"the form has more than {MAX_PARTS} parts")
        name, filename = _names(bytes(self._held[:end]))
        del self._held[: end + 4]
        self._state = _State.DATA
        self._listener.on_part(name, filename)
        return True


def _names(head: bytes) -> tuple[str, str | None]:
    """The names of the part and its file.

    Raises:
        BadRequest: the head has no name.
    """
    for line in head.split(b"\r\n"):
        title, _, value = line.partition(b":")
        if title.strip().lower() != b"content-disposition":
            continue
        given = {
            match[1].lower(): match[3] if match[2] is None else re.sub(rb"\\(.)", rb"\1", match[2])
            for match in _PARAMETER.finditer(value)
        }
        filename = given.get(b"filename")
        if b"name" in given and value.partition(b";")[0].strip().lower() == b"form-data":
            return _text(given[b"name"]), None if filename is None else _text(filename)
    raise BadRequest("malformed multipart body: a part has no content-disposition with a name")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


MAX_HELD_BYTES: Final = 1024 * 1024
MAX_FIELD_BYTES: Final = 4096
MAX_FORM_BYTES: Final = 64 * 1024
"""All of a form but its file."""


class UploadAborted(Exception):
    """The client has disconnected, or its request was refused."""


class FileUpload:
    """The body of one request. A `BodySink` and a `PartListener`."""

    def __init__(
        self,
        store: ObjectStore,
        owner: str,
        new_id: Callable[[Mapping[str, str]], str],
        boundary: bytes,
        max_file_bytes: int,
    ) -> None:
        """`new_id` returns the file's id, given the fields that precede the file, or raises BadRequest."""
        self.max_bytes = max_file_bytes + MAX_FORM_BYTES
        self.fields: dict[str, str] = {}
        """The form's fields other than the file."""
        self.filename = ""
        self.object_id = ""
        """The file's id, once the file has begun."""
        self._store = store
        self._owner = owner
        self._new_id = new_id
        self._max_file_bytes = max_file_bytes
        self._parser = MultipartParser(boundary, self)
        self._field: str | None = None
        """The field that is being received; None while it is the file."""
        self._value = bytearray()
        self._num_bytes = 0
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._has_changed = asyncio.Event()
        self._is_complete = self._is_aborted = False
        self._resume: Callable[[], None] | None = None
        self._task: asyncio.Task[int] | None = None
        """Writes the file."""
        self.on_end: Callable[[], None] = lambda: None
        """Called once, when the upload is over in any way."""
        self._is_over = False

    # the body, as it arrives

    def write(self, data: bytes) -> None:
        if self._is_aborted:
            raise BadRequest("the upload has ended")
        if self._task is not None and self._task.done():
            self._task.result()  # raises: it ends only when all has arrived, or with an error
        self._parser.feed(data)

    def is_full(self, resume: Callable[[], None]) -> bool:
        if self._held_bytes <= MAX_HELD_BYTES or self._is_ended():
            return False
        self._resume = resume
        return True

    def abort(self) -> None:
        if not self._is_complete:
            self._is_aborted = True
            self._has_changed.set()
        self._end()

    async def finish(self) -> int:
        """Wait until the file is stored; return its size in bytes.

        Raises:
            BadRequest: the form is incomplete, or has no file.
            ApiError: the file could not be stored.
        """
        try:
            if not self._parser.is_complete:
                raise BadRequest("malformed multipart body: it ends before its last boundary")
            if self._task is None:
                raise BadRequest("the form has no `file`", param="file")
            self._is_complete = True
            self._has_changed.set()
            return await self._task
        finally:
            self.abort()

    async def ended(self) -> None:
        """Wait until nothing is written any more."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def too_large(self) -> PayloadTooLarge:
        """Return the error for a file beyond the limit."""
        return PayloadTooLarge(
            f"the file exceeds the limit of {self._max_file_bytes} bytes (--max-file-bytes); split it",
            param="file",
        )

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.on_end()

    def _is_ended(self) -> bool:
        return self._task is None or self._task.done() or self._is_aborted

    # the parts of the form

    def on_part(self, name: str, filename: str | None) -> None:
        if name != "file":
            if filename is not None:
                raise BadRequest(f"the form has a file in {name[:64]!r}; send it as `file`", param="file")
            if name in self.fields:
                raise BadRequest(f"the form has {name[:64]!r} twice")
            if self._task is not None and name.startswith("expires_after"):
                raise BadRequest("expires_after must precede the file in the form", param="expires_after")
            self._field = name
            return
        if self._task is not None:
            raise BadRequest("the form has two files; send one", param="file")
        self._field = None
        self.object_id = self._new_id(self.fields)
        self.filename = batch_program.plain_name(filename or "")
        self._task = asyncio.create_task(
            self._store.upload(batch_program.FILES, self._owner, self.object_id, self._pieces()),
            name="file upload",
        )
        self._task.add_done_callback(self._on_written)

    def on_part_data(self, data: bytes) -> None:
        if self._field is not None:
            self._value += data
            if len(self._value) > MAX_FIELD_BYTES:
                raise BadRequest(f"the form's field {self._field[:64]!r} exceeds {MAX_FIELD_BYTES} bytes")
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._max_file_bytes:
            raise self.too_large()
        self._held.append(data)
        self._held_bytes += len(data)
        self._has_changed.set()

    def on_part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")
            self._value.clear()

    # to the storage

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            while self._held and not self._is_aborted:
                piece = b"".join(self._held)
                self._held.clear()
                self._held_bytes = 0
                self._resume_reading()
                yield piece
            if self._is_aborted:
                raise UploadAborted
            if self._is_complete:
                return
            self._has_changed.clear()
            await self._has_changed.wait()

    def _on_written(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled():
            task.exception()  # `write` and `finish` raise it, unless the client is gone
        self._held.clear()
        self._held_bytes = 0
        self._resume_reading()

    def _resume_reading(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()


MAX_UPLOADS: Final = 64
"""Uploads at a time, each of which holds a megabyte. Owners share them (`OwnerSlots`)."""
PAGE: Final = 1000
"""Files of a page at most, whatever `limit` says."""
_KIND: Final = batch_program.FILES
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
            return self._store.new_id(batch_program.FILE_ID_PREFIX, self._ttl_s)
        if anchor != "created_at":
            raise BadRequest("expires_after.anchor must be created_at", param="expires_after")
        if not (seconds.isascii() and seconds.isdigit() and MIN_EXPIRY_S <= int(seconds[:9]) <= MAX_EXPIRY_S):
            raise BadRequest(
                f"expires_after.seconds must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param="expires_after"
            )
        return self._store.new_id(batch_program.FILE_ID_PREFIX, float(seconds[:9]))

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
        return batch_program.shown_file(file)

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
        return batch_program.shown_file(file)

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
        limit = limit_of(query, MAX_LISTED_FILES, MAX_LISTED_FILES)
        purpose = query.get("purpose")
        ids = in_order(await self._store.ids(_KIND, owner), query, batch_program.FILE_ID_PREFIX)

        async def read(file_id: str) -> FileObject | None:
            file = await self.find(owner, file_id)
            return (
                None
                if file is None or purpose not in (None, file.purpose)
                else batch_program.shown_file(file)
            )

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

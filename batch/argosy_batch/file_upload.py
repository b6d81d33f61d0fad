"""A form's file on its way to the storage.

Owns: what of the form has arrived and not been written, at most `MAX_HELD_BYTES` and one piece of the connection.
Must not know: HTTP, what the file is for.
Invariant: the file is stored once `finish` returns, and not at all if it raises or is not called.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from argosy_batch.multipart import MultipartParser
from argosy_batch.storage.object_store import ObjectStore
from argosy_protocol import file_objects
from argosy_protocol.errors import BadRequest, PayloadTooLarge

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
        self.filename = file_objects.plain_name(filename or "")
        self._task = asyncio.create_task(
            self._store.upload(file_objects.KIND, self._owner, self.object_id, self._pieces()),
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

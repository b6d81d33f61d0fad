"""A bucket as a storage: s3:// and gs://, by obstore, with the credentials of the environment.

`create` and `replace` are the provider's own conditional writes (If-None-Match, If-Match; generations at Google), so
the store must have them: Amazon S3, Google Cloud Storage, MinIO and Ceph do. Uploads in parts that a crash ended stay
in the bucket unseen: set a lifecycle rule that aborts them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import GCSStore, S3Store

from argosy_batch.object_store import CHUNK_BYTES, AlreadyExists, Blob, BlobEntry, Changed
from argosy_protocol import __version__
from argosy_protocol.errors import StorageUnavailable

if TYPE_CHECKING:
    from obstore import PutResult, UpdateVersion
    from obstore.store import ClientConfig


log = logging.getLogger(__name__)

CONNECT_TIMEOUT = timedelta(seconds=5)
REQUEST_TIMEOUT = timedelta(minutes=5)
"""Of one request and its response: a part of an upload, or a whole read."""


class BucketStore:
    """Keeps blobs in a bucket, below the prefix of its URL."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`.

        Raises:
            ValueError: the URL, the endpoint or the credentials cannot be used; the message quotes none of them.
        """
        endpoint = _endpoint(url)
        options: ClientConfig = {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": CONNECT_TIMEOUT,
            "timeout": REQUEST_TIMEOUT,
            "user_agent": f"argosy-batch/{__version__}",
        }
        try:
            self._store: S3Store | GCSStore
            if url.startswith("s3://"):
                settings: Any = {"endpoint": endpoint} if endpoint else {}
                self._store = S3Store.from_url(url, config=settings, client_options=options)
            else:
                settings = {"base_url": endpoint, "skip_signature": True} if endpoint else {}
                self._store = GCSStore.from_url(url, config=settings, client_options=options)
        except BaseError:
            raise ValueError("--storage: the bucket's URL or its credentials cannot be used") from None

    async def get(self, key: str) -> Blob | None:
        with _explained():
            try:
                result = await obstore.get_async(self._store, key)
                data = bytes(await result.bytes_async())
            except (NotFoundError, FileNotFoundError):
                return None
            return Blob(data, _version(result.meta["e_tag"], result.meta["version"]))

    async def create(self, key: str, data: bytes) -> str:
        with _explained():
            try:
                return _version_of(await obstore.put_async(self._store, key, data, mode="create"))
            except (AlreadyExistsError, PreconditionError):
                raise AlreadyExists(key) from None

    async def replace(self, key: str, data: bytes, version: str) -> str:
        tag, _, generation = version.partition("\n")
        expected: UpdateVersion = {}
        if tag:
            expected["e_tag"] = tag
        if generation:
            expected["version"] = generation
        with _explained():
            try:
                return _version_of(await obstore.put_async(self._store, key, data, mode=expected))
            except (PreconditionError, NotFoundError, FileNotFoundError):
                raise Changed(key) from None

    async def upload(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        counted = _Counted(chunks)
        try:
            with _explained():
                await obstore.put_async(self._store, key, counted.chunks())
        except Exception:
            if counted.failure is not None:
                raise counted.failure from None
            raise
        return counted.size

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        with _explained():
            try:
                result = await obstore.get_async(self._store, key)
            except (NotFoundError, FileNotFoundError):
                return
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    async def delete(self, key: str) -> bool:
        with _explained():
            try:
                await obstore.delete_async(self._store, key)
            except (NotFoundError, FileNotFoundError):
                return False
            return True

    async def entries(self, folder: str) -> list[BlobEntry]:
        entries = []
        with _explained():
            async for page in obstore.list(self._store, folder):
                entries += [
                    BlobEntry(each["path"], each["size"], each["last_modified"].timestamp()) for each in page
                ]
        return sorted(entries)

    async def time(self) -> float:
        key = f"work/clock-{secrets.token_hex(16)}"
        with _explained():
            await obstore.put_async(self._store, key, b"", mode="overwrite")
            try:
                found = await obstore.head_async(self._store, key)
            finally:
                await obstore.delete_async(self._store, key)
        return found["last_modified"].timestamp()

    async def remove_leftovers(self, older_than: float) -> None:
        """Do nothing: the bucket's lifecycle rule does it."""


class _Counted:
    """Counts the bytes of an upload, and keeps the exception that ended it, which obstore would hide."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = chunks
        self.size = 0
        self.failure: BaseException | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                self.size += len(chunk)
                yield chunk
        except BaseException as failure:
            self.failure = failure
            raise


def _endpoint(url: str) -> str:
    """The address of a store other than the provider's own, from the environment; empty if none."""
    if url.startswith("s3://"):
        return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    return emulator if not emulator or "://" in emulator else f"http://{emulator}"


def _version_of(result: PutResult) -> str:
    return _version(result["e_tag"], result["version"])


def _version(tag: str | None, generation: str | None) -> str:
    return f"{tag or ''}\n{generation or ''}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        log.error("storage: %s: %s", type(error).__name__, str(error)[:500])
        raise StorageUnavailable from error

"""Object stores: models below a prefix of a bucket, `s3://BUCKET/PREFIX` (S3 and what speaks it) and `gs://BUCKET/PREFIX`.

Owns the listing of a prefix as a snapshot, and reads of its objects. Every read asks for the ETag that was listed
(If-Match), so that an object that changed meanwhile is noticed. Must not know credentials (`bucket_clients`) or what a
failure's text means (`bucket_errors`).

A file's digest is the one that an object `SHA256SUMS` below the prefix names, else the object's ETag where that is an
MD5 sum. A listing does not say whether it is: ETags of multipart uploads have a dash, but those of objects encrypted
with managed keys only look like a sum, as do those of some other stores. Hence one small object is read and compared
before ETags are believed. Objects without a digest are checked by size and ETag.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from argosy_fetcher.errors import (
    InvalidSource,
    ModelNotFound,
    SourceChanged,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.snapshot import MAX_FILE_BYTES, MAX_FILES, Digest, RemoteFile, Snapshot, check_path
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources import sha256sums
from argosy_fetcher.sources.bucket_clients import BucketClient, open_bucket
from argosy_fetcher.sources.bucket_endpoint import bucket_name
from argosy_fetcher.sources.bucket_errors import Provider, explained
from argosy_fetcher.sources.source import Chunk

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

CHUNK_BYTES = 1 << 20
"""Smallest chunk that is passed on: what a cut connection loses at most."""
LIST_CHUNK = 1000
MAX_PROBE_BYTES = 1 << 20
"""Largest object that is read to learn whether ETags are MD5 sums."""

_PROVIDERS: dict[str, Provider] = {"s3": "s3", "gs": "gs"}
_ETAG = re.compile(r'(W/)?"[!#-~]{1,256}"')
_MD5_ETAG = re.compile(r'"([0-9a-fA-F]{32})"')
_STORE_FOLDER = ".argosy"


class _Listed(NamedTuple):
    """An object, as the listing shows it."""

    size: int
    etag: str
    """In quotes, as headers have it; empty if the store names none."""
    modified: str


class ObjectStoreSource:
    """`Source` of one prefix of one bucket.

    Raises:
        InvalidSource: the URI or the endpoint is malformed.
    """

    def __init__(self, uri: SourceUri, credentials: Mapping[str, str]) -> None:
        self._provider = _PROVIDERS[uri.scheme]
        self._bucket, self._prefix = _location(uri)
        self._credentials = credentials
        self._name = bucket_name(uri, credentials)

    @property
    def name(self) -> str:
        return self._name

    @property
    def requested_revision(self) -> str:
        return ""

    def snapshot(self) -> Snapshot:
        listed = _files(self._list(), self.name)
        if not listed:
            where = f"below {self._prefix}/" if self._prefix else "in it"
            raise ModelNotFound(
                f"{self.name}: the bucket has no objects {where}; name the folder that holds config.json"
            )
        digests = self._digests(listed)
        files = tuple(
            RemoteFile(path, entry.size, digests.get(path), entry.etag)
            for path, entry in sorted(listed.items())
        )
        return Snapshot(self.name, _revision(listed), files)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        if start >= stop:
            return
        options: GetOptions = {"range": (start, stop)}
        if file.version and not file.version.startswith("W/"):
            options["if_match"] = file.version
        key = f"{self._prefix}/{file.path}" if self._prefix else file.path
        left = stop - start
        with explained(self._client.bucket, file.path):
            result = self._client.store.get(key, options=options)
            if _is_other(result.meta, file):
                raise SourceChanged(f"{self.name}: {file.path} has changed since it was listed; fetch again")
            for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                yield memoryview(chunk)[:left]
                left -= min(left, len(chunk))

    def close(self) -> None:
        self.__dict__.pop("_client", None)

    @functools.cached_property
    def _client(self) -> BucketClient:
        return open_bucket(self.name, self._provider, self._bucket, self._credentials)

    def _list(self) -> dict[str, _Listed]:
        """Objects below the prefix by their path below it; some are folders."""
        start = f"{self._prefix}/" if self._prefix else ""
        found: dict[str, _Listed] = {}
        with explained(self._client.bucket):
            for page in self._client.store.list(self._prefix or None, chunk_size=LIST_CHUNK):
                for item in page:
                    if not item["path"].startswith(start) or item["path"] == start.rstrip("/"):
                        continue  # obstore cuts the slash off a name such as `PREFIX/`, which is the folder itself
                    path = item["path"][len(start) :]
                    found[path] = _Listed(item["size"], _etag(item), item["last_modified"].isoformat())
                    if len(found) > MAX_FILES:
                        raise UnsupportedModel(
                            f"{self.name}: more than {MAX_FILES} objects; name the folder that holds config.json"
                        )
        return found

    def _digests(self, listed: Mapping[str, _Listed]) -> dict[str, Digest]:
        digests: dict[str, Digest] = {}
        if (entry := listed.get(sha256sums.FILE_NAME)) is not None:
            if entry.size > sha256sums.MAX_SUMS_BYTES:
                raise UnsupportedModel(
                    f"{self.name}: {sha256sums.FILE_NAME} is too large: {entry.size} bytes"
                )
            digests = sha256sums.parse_sha256sums(self._content(sha256sums.FILE_NAME, entry), self.name)
        sums = {
            path: match[1].lower()
            for path, entry in listed.items()
            if path not in digests and (match := _MD5_ETAG.fullmatch(entry.etag))
        }
        small = [(listed[path].size, path) for path in sums if 0 < listed[path].size <= MAX_PROBE_BYTES]
        if small:
            _, path = min(small)
            content = self._content(path, listed[path])
            if hashlib.md5(content, usedforsecurity=False).hexdigest() == sums[path]:
                digests |= {path: Digest("md5", sum_) for path, sum_ in sums.items()}
        return digests

    def _content(self, path: str, entry: _Listed) -> bytes:
        content = b"".join(self.read(RemoteFile(path, entry.size, version=entry.etag), 0, entry.size))
        if len(content) != entry.size:
            raise TransientError(f"{self.name}: {path} ended early")
        return content


def _location(uri: SourceUri) -> tuple[str, str]:
    """Bucket and prefix of a URI."""
    bucket, _, prefix = uri.location.partition("/")
    try:
        return bucket, check_path(prefix) if prefix else ""
    except UnsupportedModel:
        raise InvalidSource(f"{uri.name}: the prefix must be a path that files can have too") from None


def _files(found: Mapping[str, _Listed], source: str) -> dict[str, _Listed]:
    """Leave out empty objects that stand for folders, and what a store of models has put beside its files."""
    folders = {path[:end] for path in found for end in range(len(path)) if path[end] == "/"}
    files = {}
    for path, entry in found.items():
        if any(part.startswith(_STORE_FOLDER) for part in path.split("/")) or (
            path in folders and entry.size == 0
        ):
            continue
        if path in folders:
            raise UnsupportedModel(f"{source}: {path!r} is an object and a folder at once")
        if entry.size > MAX_FILE_BYTES:
            raise UnsupportedModel(f"{source}: {path!r} is too large: {entry.size} bytes")
        files[check_path(path)] = entry
    return files


def _revision(listed: Mapping[str, _Listed]) -> str:
    lines = (
        f"{path}\0{entry.size}\0{entry.etag or entry.modified}\n" for path, entry in sorted(listed.items())
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def _etag(meta: ObjectMeta) -> str:
    """An object's ETag in quotes; empty if it has none that a header could carry."""
    etag = meta["e_tag"] or ""
    etag = etag if etag.endswith('"') else f'"{etag}"'
    return etag if _ETAG.fullmatch(etag) else ""


def _is_other(meta: ObjectMeta, file: RemoteFile) -> bool:
    """Whether an object is not the one that was listed, told for stores that do not know If-Match."""
    etag = _etag(meta).removeprefix("W/")
    return meta["size"] != file.size or bool(
        etag and file.version and etag != file.version.removeprefix("W/")
    )

"""Opens a storage by its location: a path, file:///PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from argosy_batch.config import ConfigError
from argosy_batch.storage.blob_store import BlobStore
from argosy_batch.storage.directory_store import DirectoryStore


def open_blobs(location: str) -> BlobStore:
    """Open a storage. Makes no request to a bucket.

    Raises:
        ConfigError: it cannot be used; the message says what to change.
    """
    if location.startswith(("s3://", "gs://")):
        try:
            from argosy_batch.storage.bucket_store import BucketStore
        except ImportError:
            raise ConfigError(
                "--storage in a bucket needs obstore: `pip install '.[storage]'` in the checkout"
            ) from None
        try:
            return BucketStore(location)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    path = location
    if "://" in location:
        url = urlsplit(location)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise ConfigError(
                "--storage must be a path, file:///PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            )
        path = unquote(url.path)
    try:
        return DirectoryStore(Path(path).absolute())
    except OSError as error:
        raise ConfigError(
            f"--storage {location} cannot be used: {error.strerror}; it must be writable, on a file system with hard "
            "links and locks"
        ) from None

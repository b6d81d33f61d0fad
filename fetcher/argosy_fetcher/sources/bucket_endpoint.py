"""Bucket endpoint: the address of a store other than Amazon's or Google's own. It is part of a bucket's name, so it is
known without the client."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.source_uri import SourceUri


def bucket_name(uri: SourceUri, credentials: Mapping[str, str]) -> str:
    """Return the canonical name of a folder of a bucket. Buckets of one name at two endpoints are two sources.

    Raises:
        InvalidSource: the endpoint is malformed.
    """
    endpoint = custom_endpoint(uri.scheme, credentials)
    return uri.name + (f"?endpoint={endpoint}" if endpoint else "")


def custom_endpoint(provider: str, credentials: Mapping[str, str]) -> str:
    """Return the base URL that replaces the provider's own, without a slash at its end; empty if none.

    Raises:
        InvalidSource: it is not a URL of a server, or has credentials in it.
    """
    if provider == "s3":
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    else:
        names = ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL")
    name = next((name for name in names if credentials.get(name)), "")
    if not name:
        return ""
    text = credentials[name].strip()
    if name == "STORAGE_EMULATOR_HOST" and "://" not in text:
        text = f"http://{text}"
    try:
        url = urlsplit(text)
        is_server = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_server = False
    if not is_server or not text.isprintable() or any(mark in text for mark in "@?#"):
        raise InvalidSource(f"{name} must be a URL such as https://HOST:PORT, without credentials and query")
    return url.geturl().rstrip("/")

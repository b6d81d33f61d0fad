"""Clients of buckets: obstore's, at the endpoint and with the credentials that named values say.

Retries are the caller's: clients make one attempt a request. Signing is obstore's. Where credentials come from is known
to `s3_credentials` and `google_credentials`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from argosy_fetcher.errors import AccessDenied, InvalidSource
from argosy_fetcher.loopback import is_loopback
from argosy_fetcher.sources.bucket_endpoint import custom_endpoint
from argosy_fetcher.sources.bucket_errors import Bucket, Provider
from argosy_fetcher.sources.google_credentials import google_access
from argosy_fetcher.sources.s3_credentials import s3_config
from argosy_protocol import __version__

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSCredential, RetryConfig

CONNECT_TIMEOUT = timedelta(seconds=10)
READ_TIMEOUT = timedelta(seconds=30)
"""Longest silence while a response arrives."""
REQUEST_TIMEOUT = timedelta(minutes=10)
"""Longest duration of a request and its response; a part on a slow line is then continued by another request."""

_ONE_ATTEMPT: RetryConfig = {"max_retries": 0}
_AWS = "https://s3.amazonaws.com"
_GOOGLE = "https://storage.googleapis.com"


@dataclass(frozen=True)
class BucketClient:
    """A client of one bucket."""

    store: S3Store | GCSStore
    bucket: Bucket


def open_bucket(source: str, provider: Provider, name: str, credentials: Mapping[str, str]) -> BucketClient:
    """Return a client. Makes no request, except to the metadata service of a machine on EC2.

    Args:
        source: name of the model's source, for errors.
        name: the bucket.

    Raises:
        AccessDenied: credentials are incomplete, or of a kind that is not supported.
        InvalidSource: the endpoint or the certificates cannot be used.
    """
    endpoint = custom_endpoint(provider, credentials)
    options = _options(endpoint, credentials)
    try:
        if provider == "s3":
            return _open_s3(source, name, endpoint, credentials, options)
        return _open_google(source, name, endpoint, credentials, options)
    except BaseError:
        # its text quotes what it could not read, which may be a key
        raise AccessDenied(f"{source}: the credentials cannot be used; check their files and names") from None


def _open_s3(
    source: str, name: str, endpoint: str, credentials: Mapping[str, str], options: ClientConfig
) -> BucketClient:
    config = s3_config(source, credentials)
    if endpoint:
        config["endpoint"] = endpoint
    store = S3Store(name, config=config, client_options=options, retry_config=_ONE_ATTEMPT)
    is_anonymous = config.get("skip_signature", False)
    return BucketClient(store, Bucket(source, name, "s3", endpoint or _AWS, is_anonymous))


def _open_google(
    source: str, name: str, endpoint: str, credentials: Mapping[str, str], options: ClientConfig
) -> BucketClient:
    access = google_access(source, credentials)
    is_plain = endpoint.startswith("http://") and not is_loopback(urlsplit(endpoint).hostname or "")
    if is_plain and not access.is_anonymous:
        raise InvalidSource(f"{source}: {endpoint} would show the credentials to the network; use https")
    config = access.config.copy()
    if endpoint:
        config["base_url"] = endpoint

    def give_token() -> GCSCredential:
        return {"token": access.token, "expires_at": None}

    # with a provider obstore looks for no files, so that a broken one does not matter to anonymous reads
    provider = give_token if access.token or access.is_anonymous else None
    store = GCSStore(
        name, config=config, client_options=options, retry_config=_ONE_ATTEMPT, credential_provider=provider
    )
    return BucketClient(store, Bucket(source, name, "gs", endpoint or _GOOGLE, access.is_anonymous))


def _options(endpoint: str, credentials: Mapping[str, str]) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "timeout": REQUEST_TIMEOUT,
        "user_agent": f"argosy-fetcher/{__version__}",
    }
    if bundle := credentials.get("AWS_CA_BUNDLE") or credentials.get("SSL_CERT_FILE"):
        try:
            ssl.create_default_context(cafile=bundle)
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise InvalidSource(f"the certificates in {bundle} cannot be used: {error.strerror}") from None
    return options

"""TLS: which authorities are trusted, and how a certificate that is not is told from other failures."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from functools import cache

import httpx

from argosy_fetcher.errors import FetchError, InvalidSource


def trusted(credentials: Mapping[str, str]) -> ssl.SSLContext:
    """Return what httpx takes as `verify`: the authorities in SSL_CERT_FILE, or its own, which clients share.

    Raises:
        InvalidSource: the file is unusable.
    """
    path = credentials.get("SSL_CERT_FILE")
    if not path:
        return _own_authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise InvalidSource(
            f"the certificates in SSL_CERT_FILE ({path}) cannot be used: {error.strerror}"
        ) from None


@cache
def _own_authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return httpx's context for these values of the environment, which it reads: parsing a hundred certificates takes
    longer than the rest of a client."""
    return httpx.create_ssl_context()


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a request failed because of the server's certificate, which no other attempt cures."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def untrusted(where: str, host: str) -> FetchError:
    """Return the error for a server whose certificate is not trusted."""
    return FetchError(
        f"{where}: the certificate of {host} is not trusted; name a file with its authority's certificate in "
        "SSL_CERT_FILE"
    )

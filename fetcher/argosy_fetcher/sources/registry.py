"""Registry of sources: maps the scheme of a URI to the class that reads it.

A source's module is imported only when a URI needs it, because the clients that it brings take long to import. To add a
source, write a module (see `source`) and name it here and in `source_uri`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol, cast

from argosy_fetcher.credentials import load_credentials
from argosy_fetcher.errors import FetchError, InvalidSource
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.source import Source

EXTRA: Final = ".[fetch]"

SOURCES: Final[dict[str, str]] = {
    "hf": "argosy_fetcher.sources.hub:HubSource",
    "s3": "argosy_fetcher.sources.object_store:ObjectStoreSource",
    "gs": "argosy_fetcher.sources.object_store:ObjectStoreSource",
    "oci": "argosy_fetcher.sources.oci:OciSource",
    "https": "argosy_fetcher.sources.web:WebSource",
    "http": "argosy_fetcher.sources.web:WebSource",
}
"""Scheme -> module:class."""


class SourceClass(Protocol):
    """The constructor that every source has."""

    def __call__(self, uri: SourceUri, credentials: Mapping[str, str]) -> Source:
        """
        Raises:
            FetchError: the credentials are malformed, or the source cannot work with this URI.
        """
        ...


def open_source(uri: SourceUri, credentials: Mapping[str, str] | None = None) -> Source:
    """Make the source of a remote URI. No request is made. The caller closes it.

    Args:
        credentials: named values; those of the environment if left out (`load_credentials`).

    Raises:
        InvalidSource: the URI is local, or credentials cannot be read.
        FetchError: the scheme needs a package that is not installed.
    """
    target = SOURCES.get(uri.scheme)
    if target is None:
        raise InvalidSource(f"{uri} is not fetched: it names a place on this machine or in the cluster")
    module, _, name = target.partition(":")
    try:
        made = cast(SourceClass, getattr(import_module(module), name))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("argosy"):
            raise
        raise FetchError(
            f"{uri.scheme}:// needs the package {missing!r}: `pip install '{EXTRA}'` in the checkout"
        ) from None
    return made(uri, load_credentials() if credentials is None else credentials)

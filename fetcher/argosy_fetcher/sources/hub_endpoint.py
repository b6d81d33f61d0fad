"""Hub endpoint: the address of the hub, and what a repository there is called in the store.

Apart from `hub_environment` because the store is searched by this name before any client is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from argosy_fetcher.errors import InvalidSource

DEFAULT_ENDPOINT: Final = "https://huggingface.co"


def hub_address(credentials: Mapping[str, str]) -> str:
    """Return the hub's address, without a slash at its end.

    Raises:
        InvalidSource: HF_ENDPOINT is not the address of a web server.
    """
    text = (credentials.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).strip().rstrip("/")
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port  # the port is checked when it is read
    except ValueError as error:
        raise InvalidSource(f"HF_ENDPOINT is not a URL: {error}") from None
    if url.scheme not in ("https", "http") or not host or not text.isprintable():
        raise InvalidSource(f"HF_ENDPOINT must be a URL such as {DEFAULT_ENDPOINT}")
    if "@" in url.netloc or url.query or url.fragment:
        raise InvalidSource(
            f"HF_ENDPOINT must be the address of {host} alone, without credentials, query or fragment; "
            "credentials belong in HF_TOKEN"
        )
    return f"{url.scheme}://{url.netloc.lower()}{url.path}"


def hub_source_name(repo_id: str, credentials: Mapping[str, str]) -> str:
    """Return the name of a repository's source. Repositories of one name on two hubs are two sources.

    Raises:
        InvalidSource: as `hub_address`.
    """
    address = hub_address(credentials)
    return f"hf://{repo_id}" + ("" if address == DEFAULT_ENDPOINT else f"?endpoint={address}")

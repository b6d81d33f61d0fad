"""Unknown hosts: tells a name that no name server knows from other connections that fail."""

from __future__ import annotations

import re
import socket
from typing import Final

from argosy_fetcher.errors import UnknownHost

_NO_NAME: Final = re.compile(
    r"Name or service not known|nodename nor servname provided|No such host is known"
)
"""What C libraries and Windows say, in texts of clients that are not Python's."""


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether a connection failed because the host does not exist, which is not: no name server answered."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def names_unknown_host(text: str) -> bool:
    """Whether a client's message is about a host that does not exist."""
    return _NO_NAME.search(text) is not None


def unknown_host(where: str, host: str, names: str) -> UnknownHost:
    """Return the error for a host that does not exist.

    Args:
        names: what names the host. A proxy's host, if one is set, is not told from it.
    """
    return UnknownHost(
        f"{where}: there is no host {host} in this network's DNS; check {names}, and the proxy's name if one is set"
    )

"""Origins of web pages, as `--allowed-origins` of the engine and of the router lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s,A-Z]+")


def origins_problem(origins: Iterable[str]) -> str:
    """Say which of the origins no browser would send, or return an empty string."""
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            return (
                f"--allowed-origins: {origin[:128]!r} is no origin as browsers send it: write "
                'scheme://host or scheme://host:port in small letters, without a path, or "*"'
            )
    return ""

"""Origins of web pages, as `--allowed-origins` of the engine and of the router lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@,A-Z\s\x7f-\U0010ffff]+")
_OWN_PORT = re.compile(r"http://.*:80|https://.*:443")
"""Browsers leave out the scheme's own port, and write names in other alphabets as `xn--...`."""


def origins_problem(origins: Iterable[str]) -> str:
    """Say which of the origins no browser would send, or return an empty string."""
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None or _OWN_PORT.fullmatch(origin) is not None:
            return (
                f"--allowed-origins: {origin[:128]!r} is no origin as browsers send it: write "
                "scheme://host or scheme://host:port in small letters, without a path and without the port 80 of http "
                'or 443 of https, or "*"'
            )
    return ""

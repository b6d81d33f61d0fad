"""Loopback addresses: the only ones that are spoken to without encryption, unless an endpoint is configured so."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a host of a URL, without brackets, is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

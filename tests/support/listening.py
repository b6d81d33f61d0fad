"""Addresses on which processes listen (Linux only)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"
"""State of a socket that listens, as the kernel writes it."""


def listening_addresses(pids: Sequence[int]) -> set[str]:
    """Return the addresses of TCP sockets on which processes listen, as the kernel writes them."""
    addresses = set()
    for pid in pids:
        held = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                held.add(os.readlink(entry))
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == LISTEN and f"socket:[{rest[5]}]" in held:
                    addresses.add(local.partition(":")[0])
    return addresses

"""Credential values: checks of what a user's environment and files hold, before clients get it.

Clients crash, or send what they should not, if a value has line breaks, as files often do. Messages name a value and
never show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from argosy_fetcher.errors import AccessDenied

MAX_FILE_BYTES = 1 << 20


def header_value(source: str, name: str, value: str) -> str:
    """Return a value without blanks around it.

    Args:
        source: name of the model's source, for errors.
        name: what the value is called.

    Raises:
        AccessDenied: a header cannot carry it.
    """
    value = value.strip()
    if not (value.isascii() and value.isprintable()):
        raise AccessDenied(
            f"{source}: {name} has characters that a header cannot carry; check where it is set"
        )
    return value


def is_true(credentials: Mapping[str, str], name: str) -> bool:
    """Return whether a switch is set."""
    return credentials.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def read_text(path: Path) -> str:
    """Return the content of a file of credentials.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too long, or not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    return content.decode()

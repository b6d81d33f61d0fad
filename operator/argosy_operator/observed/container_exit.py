"""Describes how a container ended, from its terminated state.

Must not judge whether an end is a problem. Invariant: a description is one printable line of bounded length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from argosy_resource.engine_command import flags_as_fields

_MAX_LAST_LINE: Final = 1024
"""Characters of a container's last line; an exception's text can be as long as its input."""


def last_line(ended: Mapping[str, Any]) -> str:
    """The last line that a container left, as its termination message or in its log; empty if it left none."""
    lines = [line.strip() for line in (ended.get("message") or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return "".join(char if char.isprintable() else " " for char in lines[-1])[:_MAX_LAST_LINE]


def describe_exit(ended: Mapping[str, Any]) -> str:
    """Reason and exit code, with the last line, which usually says why, and the fields that an engine's flags are."""
    result = f"{ended.get('reason') or 'Error'}, code {ended.get('exitCode', '?')}"
    line = last_line(ended)
    fields = flags_as_fields(line)
    return (f"{result}: {line}" if line else result) + (f"; {fields}" if fields else "")

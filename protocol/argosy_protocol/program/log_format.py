"""Log format of all programs: one line per record, with tracebacks bounded in frames and bytes.

The bounds keep an error that a client can provoke, a thousand frames deep, from filling a disk.
Must not know: what is logged, or where to.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import TypeAlias

MAX_FRAMES = 24
"""Innermost frames shown per exception; most of the outer ones belong to the server's own machinery."""
MAX_TRACEBACK_BYTES = 8 * 1024
"""Limit of a whole traceback, including the exceptions that caused it."""
MAX_RECORD_BYTES = 32 * 1024
"""Limit of a whole record."""

_FORMAT = "%(asctime)s %(levelname)s {}%(name)s %(message)s"
_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class BoundedFormatter(logging.Formatter):
    """Formats records; text beyond the bounds is left out in the middle.

    Args:
        process: name of this process, for programs that have several; it precedes the logger's.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__(_FORMAT.format(f"[{process}] " if process else ""))

    def format(self, record: logging.LogRecord) -> str:
        return _shortened(super().format(record), MAX_RECORD_BYTES)

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's name
        kind, error, frames = ei
        if kind is None or error is None:
            return ""
        lines = traceback.format_exception(kind, error, frames, limit=-MAX_FRAMES)
        return _shortened("".join(lines).rstrip("\n"), MAX_TRACEBACK_BYTES)


def format_frames(frames: TracebackType | None) -> str:
    """Format a traceback without the exception's message, which may quote a prompt, within the same bounds."""
    return _shortened("".join(traceback.format_tb(frames, limit=-MAX_FRAMES)), MAX_TRACEBACK_BYTES)


def configure_logging(level: str, handler: logging.Handler | None = None, process: str = "") -> None:
    """Send every logger's records to `handler` (standard error by default) in this format (`BoundedFormatter`)."""
    handler = handler or logging.StreamHandler()
    handler.setFormatter(BoundedFormatter(process))
    logging.basicConfig(level=level, handlers=[handler])


def _shortened(text: str, limit: int) -> str:
    """Leave out the middle of a text that has more characters than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 :]}"

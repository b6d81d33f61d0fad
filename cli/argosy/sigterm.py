"""SIGTERM for commands that may be killed at any moment, and that run as a container's first process: the kernel keeps
the signal from such a process unless it has a handler."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from argosy.errors import TERMINATED


@contextmanager
def ends_at_sigterm(last_line: str) -> Iterator[None]:
    """Let SIGTERM end the process at once, with a last line on standard error, while the context lasts."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        with suppress(OSError):
            os.write(2, f"argosy: {last_line}\n".encode())
        os._exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

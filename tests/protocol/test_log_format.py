"""The bounds of what one log record may take."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest

from argosy_protocol.program.process import (
    MAX_FRAMES,
    MAX_RECORD_BYTES,
    MAX_TRACEBACK_BYTES,
    BoundedFormatter,
)


def logged(fail: Callable[[], None]) -> str:
    """What is written about a failure."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(BoundedFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        fail()
    except Exception:
        logger.exception("it failed")
    return stream.getvalue()


def ping(levels: int) -> None:
    pong(levels - 1) if levels else deepest()


def pong(levels: int) -> None:
    ping(levels - 1) if levels else deepest()


def deepest() -> None:
    raise ValueError("at the bottom")


def chained(causes: int) -> None:
    try:
        if causes:
            chained(causes - 1)
        else:
            ping(100)
    except ValueError as error:
        raise ValueError(f"cause {causes}") from error


def test_a_short_traceback_is_whole() -> None:
    text = logged(lambda: ping(3))
    assert text.count("  File ") == 7
    assert text.endswith("ValueError: at the bottom\n")


def test_a_deep_traceback_shows_its_innermost_frames() -> None:
    text = logged(lambda: ping(400))
    assert "in deepest" in text
    assert "in logged" not in text
    assert text.count("  File ") <= MAX_FRAMES
    assert text.endswith("ValueError: at the bottom\n")


def test_a_long_chain_of_causes_is_cut_in_the_middle() -> None:
    text = logged(lambda: chained(60))
    assert len(text) < MAX_TRACEBACK_BYTES + 200
    assert "in deepest" in text
    assert text.endswith("ValueError: cause 60\n")


@pytest.mark.parametrize("size", [100, 10 * MAX_RECORD_BYTES])
def test_a_record_has_a_bounded_size(size: int) -> None:
    def fail() -> None:
        raise ValueError("x" * size)

    text = logged(fail)
    assert "it failed" in text
    assert len(text) < MAX_RECORD_BYTES
    record = logging.LogRecord("test", logging.ERROR, "", 0, "y" * size, None, None)
    assert len(BoundedFormatter().format(record)) < MAX_RECORD_BYTES + 200

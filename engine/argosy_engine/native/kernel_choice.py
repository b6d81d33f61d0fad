"""Choice between two variants of the kernels where build.py's table does not know the CPU: measured once, and kept.

Some CPUs multiply bfloat16 by AVX-512 more slowly than float32. One that the table does not know is timed by the
first process that loads the kernels. The seconds are kept in the private cache folder, in a file of this CPU's model
and these kernels; later processes choose by it.

Invariant: processes that share a cache folder choose alike. So processes that start together measure one after the
other, all but the first find the file, and what cannot be kept is not used.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

log = logging.getLogger(__name__)

ROWS = (1, 16, 64)
"""Rows of the products that are timed. One variant serves all numbers of rows, or a row would depend on its batch."""
MARGIN = 1.1
"""How much faster than the default a variant has to be. Timings of one variant differ by less."""
_MAX_BYTES = 4096
"""Of the file."""

Seconds = Annotated[float, Meta(gt=0, le=60)]
Measure = Callable[[], Mapping[str, Sequence[float]]]
"""Times products by both variants; returns their seconds for each of ROWS, by the variant's name."""


class Figures(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept."""

    seconds: dict[str, tuple[Seconds, ...]]
    """Of a product with each of ROWS, by the variant's name."""

    def speedup(self, default: str, rival: str) -> float:
        """Return how many times as fast as the default its rival is, as the geometric mean over ROWS."""
        pairs = zip(self.seconds[default], self.seconds[rival], strict=True)
        return math.exp(math.fsum(math.log(slow / fast) for slow, fast in pairs) / len(ROWS))

    def prefers(self, default: str, rival: str) -> bool:
        return self.speedup(default, rival) > MARGIN

    def describe(self, default: str, rival: str) -> str:
        """Say what was chosen, and why."""
        chosen = rival if self.prefers(default, rival) else default
        speedup = self.speedup(default, rival)
        return f"{chosen}: measured on this CPU, {rival} is {speedup:.2f} times as fast as {default} ({MARGIN} decide)"


def kept_figures(file: Path, default: str, rival: str) -> Figures | None:
    """Return the figures of a file; None if there is none, or it is not what `measured_figures` writes."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = os.read(descriptor, _MAX_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(data) > _MAX_BYTES:
        return None
    try:
        return _checked(msgspec.json.decode(data, type=Figures), default, rival)
    except (msgspec.DecodeError, RecursionError):
        return None


def measured_figures(file: Path, default: str, rival: str, measure: Measure) -> Figures | None:
    """Return the figures of a file, measuring and writing them if it has none; None if they cannot be kept.

    Args:
        file: in a folder that exists. Whatever else it is, is replaced.

    Raises:
        Exception: that of `measure`.
    """
    try:
        with (file.parent / "choice.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (kept := kept_figures(file, default, rival)) is not None:
                return kept
            seconds = {name: tuple(map(float, each)) for name, each in measure().items()}
            # Read again, so that this process chooses as the next will.
            _write(file, msgspec.json.encode(Figures(seconds)))
            return kept_figures(file, default, rival)
    except OSError as error:
        log.info("the choice of CPU kernels cannot be kept: %s", error)
        return None


def _checked(figures: Figures, default: str, rival: str) -> Figures | None:
    is_whole = all(len(each) == len(ROWS) for each in figures.seconds.values())
    return figures if is_whole and figures.seconds.keys() == {default, rival} else None


def _write(file: Path, data: bytes) -> None:
    """Write a file whole: nobody sees a part of it, whenever this process ends."""
    descriptor, scratch = tempfile.mkstemp(dir=file.parent, prefix=".choice-")
    try:
        with open(descriptor, "wb") as target:
            target.write(data)
        os.replace(scratch, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise

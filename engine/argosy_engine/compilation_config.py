"""CompilationConfig: what torch.compile compiles and what CUDA graphs capture, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from argosy_engine.errors import ConfigError

MAX_DEFAULT_SIZE = 512
"""Largest number of requests that is captured by default."""
MAX_CAPTURE_SIZES = 256
CaptureSize = Annotated[int, Meta(ge=1, le=1 << 14)]


class CompilationConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is compiled, and what is captured for replay (`--compilation-config`). Names are vLLM's."""

    level: Annotated[int, Meta(ge=0, le=3)] = 0
    """0: our kernels and torch's operations as they are; 3: parts of the layers compiled by torch.compile."""
    mode: Annotated[int, Meta(ge=0, le=3)] | None = None
    """vLLM's newer name of the level."""
    cudagraph_mode: Literal["NONE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"] = (
        "FULL_DECODE_ONLY"
    )
    cudagraph_capture_sizes: Annotated[tuple[CaptureSize, ...], Meta(max_length=MAX_CAPTURE_SIZES)] = ()
    """Numbers of requests; empty: `capture_sizes` chooses."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            if self.level not in (0, self.mode):
                raise ValueError("level and mode are two names of the same: give one")
            force_setattr(self, "level", self.mode)
            force_setattr(self, "mode", None)

    def check(self) -> None:
        """Reject vLLM's values that are not supported.

        Raises:
            ConfigError: with the reason and what to use.
        """
        if (reason := _REFUSED_LEVELS.get(self.level)) is not None:
            raise ConfigError(
                f"--compilation-config: level {self.level} is not supported, because {reason}; use 0 or 3"
            )


def capture_sizes(
    max_num_seqs: int, wanted: Sequence[int] = (), largest: int = MAX_DEFAULT_SIZE
) -> list[int]:
    """Return the numbers of requests to capture, ascending, at most max_num_seqs.

    Args:
        wanted: `cudagraph_capture_sizes`; default: 1, 2, 4, then steps of 8 to 256 and of 16 to `largest`, and
            max_num_seqs.
    """
    if wanted:
        return sorted({size for size in wanted if size <= max_num_seqs})
    last = min(max_num_seqs, largest)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16), last}
    return sorted(size for size in sizes if size <= last)


_REFUSED_LEVELS = {
    1: "torch.compile would compile again while requests wait",
    2: "a whole model cannot be compiled at once: attention, experts and sums over ranks are not compiled",
}

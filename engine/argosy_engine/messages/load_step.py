"""LoadStep: how far the load of a model is, on its way from a worker to the core and to the API process.

Owns: the message, and the latest one of an engine core. Must not know: what a stall is (`core.proc.load_watch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct


class LoadStep(Struct, frozen=True, array_like=True):
    """What a worker's load has reached. A load advances with every new one."""

    phase: Annotated[str, Meta(max_length=64)]
    """Such as `weights` or `kv cache`."""
    num_done: Annotated[int, Meta(ge=0)] = 0
    """In the phase `weights` bytes of the checkpoint."""
    num_total: Annotated[int, Meta(ge=0)] = 0
    """0: unknown."""

    def __str__(self) -> str:
        return f"{self.phase}, {100 * self.num_done // self.num_total} %" if self.num_total else self.phase


OnLoadStep = Callable[[LoadStep], None]


def ignore_step(step: LoadStep) -> None:
    pass


class LatestStep:
    """The latest step of any worker. Threads may note steps while another one reads."""

    def __init__(self) -> None:
        self.count = 0
        self.step = LoadStep("imports")

    def note(self, step: LoadStep) -> None:
        self.step = step
        self.count += 1

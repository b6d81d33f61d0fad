"""CUDA graphs on a CPU: a replay calls what was captured once more, with the Python values of the capture.

So a replay that depends on a Python value of the step, or on a tensor that is made anew for each, gives wrong results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class RerunGraph:
    def __init__(self, run: Callable[[], torch.Tensor], output: torch.Tensor, replays: list[int]) -> None:
        self._run = run
        self._replays = replays
        self.output = output

    @torch.inference_mode()
    def replay(self) -> None:
        self._replays.append(len(self.output))
        self.output.copy_(self._run())


class RerunGraphs:
    """Attributes:
    replays: number of rows of each replay.
    fails_at: number of rows whose capture fails.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self.captured: list[int] = []
        self.replays: list[int] = []
        self.fails_at = fails_at

    def capture(self, run: Callable[[], torch.Tensor]) -> RerunGraph:
        output = run()
        if len(output) == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(len(output))
        return RerunGraph(run, output.clone(), self.replays)

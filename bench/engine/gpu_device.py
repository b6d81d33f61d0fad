"""What the device itself reaches, measured: the memory's speed by copies, the tensor cores' by one matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

MIB = 1 << 20


class Device:
    """The device that figures are measured on. A CPU only tries the scripts."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = name == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median seconds of one call, by the device's clock; inputs stay in its cache if they fit.

        On a GPU, calls are captured as a graph, because a kernel may take less time than its launch.
        """
        if not self.is_cuda:
            return self._timed(run)
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run()
        return self._timed(graph.replay) / repeats

    def _timed(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of a call that takes much longer than its launch."""
        if not self.is_cuda:
            before = time.perf_counter()
            run()
            return time.perf_counter() - before
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[1:])

    def copy_bytes_per_s(self) -> float:
        """Measure the memory's speed, reads plus writes, with copies of 1 GiB; in a graph they are a third slower."""
        count = 1024 * MIB if self.is_cuda else MIB
        source = torch.empty(count, dtype=torch.uint8, device=self.torch)
        target = torch.empty_like(source)
        return 2 * count / self._timed(lambda: target.copy_(source))

    def matmul_flops_per_s(self) -> float:
        """Measure products of bfloat16 matrices of 8192 x 8192."""
        size = 8192 if self.is_cuda else 64
        a, b = torch.randn(2, size, size, device=self.torch).bfloat16().unbind(0)
        return 2 * size**3 / self._timed(lambda: a @ b)

"""NativeStep: one step's metadata in the form that the CPU kernels read, a struct of pointers into arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from argosy_engine.native.library import StepStruct


class NativeStep:
    """Owns the arrays that `struct` points to.

    Args:
        seq_lens, query_lens: per request, the number of tokens after this step and of new tokens.
        slot_mapping: int64 [T].
        block_tables: int64 [R, max_blocks].
    """

    def __init__(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> None:
        lens = np.array(seq_lens, dtype=np.int32)
        new = np.array(query_lens, dtype=np.int32)
        starts = np.zeros(len(new) + 1, dtype=np.int32)
        np.cumsum(new, out=starts[1:])
        num_tokens = int(starts[-1])
        if num_tokens == len(new):
            positions = lens.astype(np.int64) - 1
        else:
            shift = np.repeat(lens - starts[1:], new)
            positions = np.arange(num_tokens, dtype=np.int64) + shift
        self._kept_alive = (lens, starts, positions, slot_mapping, block_tables)
        self.struct = StepStruct(
            positions=positions.ctypes.data,
            slots=slot_mapping.data_ptr(),
            query_starts=starts.ctypes.data,
            seq_lens=lens.ctypes.data,
            block_tables=block_tables.data_ptr(),
            table_stride=block_tables.stride(0),
            num_tokens=num_tokens,
            num_requests=len(new),
        )

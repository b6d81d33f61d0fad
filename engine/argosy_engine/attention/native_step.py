"""NativeStep: one step's metadata in the form that the CPU kernels read, a struct of pointers into arrays."""

from __future__ import annotations

import numpy as np

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.native.library import StepStruct


class NativeStep:
    """Owns the arrays that `struct` points to."""

    def __init__(self, meta: AttentionMetadata) -> None:
        lens = np.array(meta.seq_lens, dtype=np.int32)
        starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(meta.query_lens, out=starts[1:])
        positions, slots, tables = meta.positions, meta.slot_mapping, meta.block_tables
        self._kept_alive = (lens, starts, positions, slots, tables)
        self.struct = StepStruct(
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            query_starts=starts.ctypes.data,
            seq_lens=lens.ctypes.data,
            block_tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            num_tokens=len(slots),
            num_requests=len(lens),
        )


def native_step(meta: AttentionMetadata) -> StepStruct:
    """Return a step's metadata in the kernels' form, created on the first call and shared by all layers."""
    step = meta.shared.get(NativeStep)
    if step is None:
        step = meta.shared[NativeStep] = NativeStep(meta)
    return step.struct

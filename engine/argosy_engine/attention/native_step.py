"""NativeStep: one step's metadata in the form that the CPU kernels read, a struct of pointers to its tensors."""

from __future__ import annotations

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.native.library import StepStruct


class NativeStep:
    """Keeps the tensors alive that `struct` points to."""

    def __init__(self, meta: AttentionMetadata) -> None:
        tables = meta.block_table
        tensors = meta.positions, meta.slot_mapping, meta.query_start_loc, meta.seq_lens, tables
        self._kept_alive = tensors
        positions, slots, query_starts, seq_lens, block_tables = (tensor.data_ptr() for tensor in tensors)
        self.struct = StepStruct(
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=block_tables,
            table_stride=tables.stride(0),
            num_tokens=len(meta.slot_mapping),
            num_requests=len(meta.seq_lens),
        )


def native_step(meta: AttentionMetadata) -> StepStruct:
    """Return a step's metadata in the kernels' form, created on the first call and shared by all layers."""
    step = meta.shared.get(NativeStep)
    if step is None:
        step = meta.shared[NativeStep] = NativeStep(meta)
    return step.struct

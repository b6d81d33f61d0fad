"""StepInputs: the tensors of a step, and the tokens that it hands to the next one. `HostInputs` makes them on a CPU.

Where device and host work at the same time, `device_inputs` does it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.worker.input_batch import InputBatch
from argosy_engine.worker.step_arrays import Ints, StepArrays


class StepTensors(NamedTuple):
    """What forward pass and sampling of a step read."""

    inputs: ModelInputs
    sampled_tokens: torch.Tensor | None
    """int64, `SampledRows.tokens`. None: the logits of all tokens are needed (but not of padding), or of none."""
    staged_rows: torch.Tensor | None = None
    """int32, what the sampler staged for the rows that sample (`Sampler.stage`); None: it copies that itself."""


class StepInputs(Protocol):
    """Makes the tensors of steps, one step after another."""

    def tensors(self, step: StepArrays) -> StepTensors:
        """Return the tensors of a step. They are valid until the next call."""
        ...

    def keep(self, slots: Ints, token_ids: torch.Tensor) -> None:
        """Keep the tokens that the last step has sampled, as the input of steps launched before the host knows them.

        Args:
            slots: [S], the last step's `SampledRows.slots`.
            token_ids: int64 [S], on the device.
        """
        ...


class HostInputs:
    """Inputs on a CPU: tensors share the memory of numpy arrays."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._last_tokens = np.zeros(batch.num_slots, np.int64)

    def tensors(self, step: StepArrays) -> StepTensors:
        batch, block_size = self._batch, self._block_size
        token_ids = batch.token_ids[step.token_slots, step.positions].astype(np.int64)
        if len(step.late):
            token_ids[step.late] = self._last_tokens[step.late_slots]
        block_of, offsets = np.divmod(step.positions, block_size)
        max_blocks = int(-(-step.seq_lens.max() // block_size))
        starts = np.zeros(len(step.slots) + 1, np.int32)
        starts[1:] = step.ends
        lens = step.seq_lens.astype(np.int32)
        query_start_loc, seq_lens = torch.from_numpy(starts), torch.from_numpy(lens)
        positions = torch.from_numpy(step.positions)
        metas = [
            AttentionMetadata(
                num_decodes=step.num_decodes,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                positions=positions,
                slot_mapping=torch.from_numpy(
                    tables[step.token_slots, block_of].astype(np.int64) * block_size + offsets
                ),
                block_table=torch.from_numpy(tables[step.slots, :max_blocks]),
                query_start_loc_cpu=starts,
                seq_lens_cpu=lens,
            )
            for tables in batch.block_tables
        ]
        wanted = step.sampled.tokens
        has_subset = 0 < len(wanted) < step.num_tokens
        types = batch.token_types(step.token_slots, step.positions)
        return StepTensors(
            ModelInputs(
                token_ids=torch.from_numpy(token_ids),
                positions=positions,
                meta=with_groups(metas),
                token_types=None if types is None else torch.from_numpy(types),
            ),
            torch.from_numpy(wanted) if has_subset else None,
        )

    def keep(self, slots: Ints, token_ids: torch.Tensor) -> None:
        self._last_tokens[slots] = token_ids.numpy()


def with_groups(metas: Sequence[AttentionMetadata]) -> AttentionMetadata:
    """Return the metadata of a step from that of its KV cache groups."""
    return metas[0] if len(metas) == 1 else replace(metas[0], groups=tuple(metas))

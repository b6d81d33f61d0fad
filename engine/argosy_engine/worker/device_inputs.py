"""DeviceInputs: inputs of steps on a GPU, in buffers of fixed addresses, filled by one copy per step.

- The host packs what a step needs into a `StagingBuffer`; the tensors of the step are views of the device's copy.
- Sampled tokens stay on the device: `keep` writes them to a vector with one entry per slot. That vector lies in front
  of the staged token ids, in one allocation, so one gather takes each input token from either.
- Block tables stay on the device too, one row per slot. A step sends the entries that were added, and gathers the rows
  of its requests.

Nothing here depends on a value that the device computes, and nothing waits for it. The addresses depend on the numbers
of tokens and requests only, and the operations on nothing, as CUDA graphs need it. Design: vLLM's v2 model runner.
"""

from __future__ import annotations

import numpy as np
import torch

from argosy_engine.attention.backend import AttentionMetadata, ModelInputs
from argosy_engine.worker.device_runtime import DeviceRuntime, StagingBuffer, padded_bytes
from argosy_engine.worker.input_batch import InputBatch, Ints, StepArrays, StepTensors, with_groups

_MAX_UPDATES = 1 << 16
"""Entries of block tables that travel with a step. More (many long prompts found in the prefix cache) go before it in
copies of their own."""
_PADDING_SLOT = -1
"""Entry of `slot_mapping` whose key and value are not written."""


class DeviceInputs:
    """Inputs on a device that works while the host prepares the next step.

    Args:
        batch: must track its changed blocks.
        max_num_tokens: most tokens of a step.
    """

    def __init__(
        self,
        batch: InputBatch,
        block_size: int,
        *,
        max_num_tokens: int,
        device: torch.device,
        runtime: DeviceRuntime,
    ) -> None:
        num_groups, num_slots, max_blocks = batch.block_tables.shape
        rows = self.num_slots = num_slots
        max_num_tokens = max(max_num_tokens, rows)
        self._batch = batch
        self._block_size = block_size
        self._padding = num_slots
        """Row of the last tokens and of the block tables that padding reads: token 0, null blocks."""
        num_bytes = sum(
            padded_bytes(size)
            for size in (
                *[8 * max_num_tokens]
                * (6 + num_groups),  # token index, ids, positions, sampled, types, key ends; slot mappings
                *[8 * rows] * 2,  # slots, sampled slots
                *[4 * (rows + 1)] * 2,  # query_start_loc, seq_lens
                *[8 * self._max_updates(rows)] * 2,
                4 * len(batch.sampler.stage(np.zeros(rows, np.int64), np.zeros(rows, np.int64))),
            )
        )
        self._staging = StagingBuffer(num_bytes, device, runtime, head=8 * (num_slots + 1))
        self._words = self._staging.device_view(torch.int64)
        """The last tokens, one per slot, and the staged parts."""
        self._last_tokens = self._words[: num_slots + 1]
        self._token_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._width = padded_bytes(4 * max_blocks) // 4
        """Entries per row of the block tables: each group's begins at an aligned address."""
        self._tables = torch.zeros(num_slots + 1, num_groups, self._width, dtype=torch.int32, device=device)
        self._step_tables = torch.zeros(rows, num_groups, self._width, dtype=torch.int32, device=device)
        self._sampled_slots: torch.Tensor | None = None

    def tensors(
        self, step: StepArrays, *, num_rows: int | None = None, num_tokens: int | None = None
    ) -> StepTensors:
        """Return the tensors of a step.

        Args:
            num_rows: pad the step to this number of requests, at most the number of slots, by requests without tokens,
                which follow the others. Default: no padding.
            num_tokens: pad it to this number of tokens, by tokens that belong to no request, which follow the others;
                default: one for each request that is padding, of a step of decodes only. If it is given, the metadata
                bounds the tokens of a request by it, instead of by what the host knows of the step.
        """
        count, num_groups = len(step.slots), len(self._batch.block_tables)
        padding = 0 if num_rows is None else num_rows - count
        token_padding = padding if num_tokens is None else num_tokens - step.num_tokens
        is_mixed = num_tokens is not None
        assert is_mixed or not padding or step.num_decodes == count, (
            "only decodes are padded by requests alone"
        )
        assert min(padding, token_padding) >= 0, "a step is larger than what it is padded to"
        updates = self._take_updates(count + padding)
        staging = self._staging
        staging.begin()
        token_index, positions, slot_mappings = self._put_tokens(step, token_padding)
        starts = np.empty(count + padding + 1, np.int32)
        starts[0], starts[1 : count + 1], starts[count + 1 :] = 0, step.ends, step.num_tokens
        lens = _padded(step.seq_lens, padding, 0).astype(np.int32)
        query_start_loc, seq_lens = staging.put(starts), staging.put(lens)
        slots = staging.put(_padded(step.slots, padding, self._padding))
        # What follows has no fixed size, and no part of a captured graph reads it.
        wanted = step.sampled.tokens
        has_subset = 0 < len(wanted) < step.num_tokens
        sampled_tokens = staging.put(wanted) if has_subset else None
        self._sampled_slots = staging.put(step.sampled.slots) if len(wanted) else None
        types = self._batch.token_types(step.token_slots, step.positions)
        token_types = None if types is None else staging.put(types)
        key_ends = None if step.key_ends is None else staging.put(step.key_ends)
        entries, blocks = staging.put(updates[0]), staging.put(updates[1])
        staged_rows = None
        if len(wanted) and not step.sampled.drafts:
            rows = self._batch.sampler.stage(step.sampled.slots, step.sampled.positions)
            staged_rows = staging.put(rows) if len(rows) else None
        staging.send()

        self._tables.view(-1).index_copy_(0, entries, blocks)
        token_ids = self._token_ids[: step.num_tokens + token_padding]
        torch.index_select(self._words, 0, token_index, out=token_ids)
        tables = self._step_tables[: count + padding]
        torch.index_select(self._tables, 0, slots, out=tables)
        metas = [
            AttentionMetadata(
                num_decodes=step.num_decodes + (0 if is_mixed else padding),
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                positions=positions,
                slot_mapping=slot_mappings[group],
                block_table=tables[:, group],
                query_start_loc_cpu=starts,
                seq_lens_cpu=lens,
                key_ends=key_ends,
                query_len_bound=num_tokens,
            )
            for group in range(num_groups)
        ]
        inputs = ModelInputs(
            token_ids=token_ids, positions=positions, meta=with_groups(metas), token_types=token_types
        )
        return StepTensors(inputs, sampled_tokens, staged_rows)

    def keep(self, slots: Ints, token_ids: torch.Tensor) -> None:
        assert self._sampled_slots is not None
        self._last_tokens.index_copy_(0, self._sampled_slots, token_ids)

    def _put_tokens(
        self, step: StepArrays, padding: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Pack where each token comes from, its position, and its slot in the cache of each group."""
        staging, batch = self._staging, self._batch
        token_ids = batch.token_ids[step.token_slots, step.positions].astype(np.int64)
        first = staging.device_index(staging.end, 8)
        staging.put(_padded(token_ids, padding, 0))
        index = np.arange(first, first + step.num_tokens)
        index[step.late] = step.late_slots
        token_index = staging.put(_padded(index, padding, self._padding))
        positions = staging.put(_padded(step.model_positions, padding, 0))
        block_of, offsets = np.divmod(step.positions, self._block_size)
        slot_mappings = []
        for tables in batch.block_tables:
            slots = tables[step.token_slots, block_of].astype(np.int64) * self._block_size + offsets
            slot_mappings.append(staging.put(_padded(slots, padding, _PADDING_SLOT)))
        return token_index, positions, slot_mappings

    def _max_updates(self, num_rows: int) -> int:
        return max(_MAX_UPDATES, num_rows * len(self._batch.block_tables))

    def _take_updates(self, num_rows: int) -> tuple[Ints, np.ndarray]:
        """Return the changed entries of the device's block tables, int64 [N], and their values, int32 [N].

        N is at least one per request and group, so that steps of decodes have parts of one size; the rest is padding.
        """
        num_groups = len(self._batch.block_tables)
        ranges = self._batch.take_changed_blocks()
        if not ranges:
            entries, blocks = _NO_ENTRIES, _NO_BLOCKS
        else:
            groups, slots, firsts, counts = np.array(ranges, np.int64).T
            ends = np.cumsum(counts)
            indices = np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
            groups, slots = np.repeat(groups, counts), np.repeat(slots, counts)
            entries = (slots * num_groups + groups) * self._width + indices
            # Read from the tables rather than from the changes: entries that occur twice get one value.
            blocks = self._batch.block_tables[groups, slots, indices]
        most = self._max_updates(num_rows)
        while len(entries) > most:
            self._staging.begin()
            parts = self._staging.put(entries[:most]), self._staging.put(blocks[:most])
            self._staging.send()
            self._tables.view(-1).index_copy_(0, *parts)
            entries, blocks = entries[most:], blocks[most:]
        padding = max(num_rows * num_groups - len(entries), 0)
        return _padded(entries, padding, self._padding * num_groups * self._width), _padded(
            blocks, padding, 0
        )


_NO_ENTRIES, _NO_BLOCKS = np.empty(0, np.int64), np.empty(0, np.int32)


def _padded(values: np.ndarray, count: int, value: int) -> np.ndarray:
    if not count:
        return values
    padded = np.empty(len(values) + count, values.dtype)
    padded[: len(values)], padded[len(values) :] = values, value
    return padded

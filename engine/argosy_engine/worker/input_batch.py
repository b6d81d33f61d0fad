"""InputBatch: the worker's memory of the requests it runs, in fixed slots of preallocated arrays.

A step only touches rows of requests that changed; building its inputs is numpy indexing, no Python per token.
(vLLM V1's `gpu_input_batch` without row swapping: rows are slots, a step gathers the ones it needs.)
"""

from __future__ import annotations

import numpy as np

from argosy_engine.worker.step import NewRequest


class InputBatch:
    """
    Args:
        max_num_seqs: number of slots.
        max_blocks: blocks per request at full length.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int) -> None:
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: NewRequest) -> None:
        slot = self._free_slots.pop()
        self.slot_of[request.request_id] = slot
        count = len(request.token_ids)
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = request.num_computed_tokens
        self.num_blocks[slot] = 0
        self.append_blocks(slot, request.block_ids)
        params = request.sampling_params
        self.temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = max(params.top_k, 0)
        self.seeds[slot] = params.seed or 0

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        start = self.num_blocks[slot]
        self.block_tables[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] = start + len(block_ids)

    def remove(self, request_id: str) -> None:
        """Frees the slot; unknown ids are fine: the request was never scheduled."""
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)

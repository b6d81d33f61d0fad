"""InputBatch: the worker's state of the requests it runs, in fixed slots of preallocated arrays.

A step only touches the rows of requests that changed, and its inputs are built by numpy indexing, without a Python loop
over tokens. Design: vLLM V1's `gpu_input_batch` without row swapping: rows are slots, and a step gathers its own.
"""

from __future__ import annotations

import numpy as np
import torch

from argosy_engine.messages.scheduler_output import BlockIds, NewRequest
from argosy_engine.sample.sampler import SamplerOptions, make_sampler


class InputBatch:
    """Token ids, block tables and counts of the running requests, one row per slot.

    Args:
        max_num_seqs: number of slots.
        max_model_len: most tokens of a request.
        max_blocks: most blocks of a request in one group.
        num_groups: number of KV cache groups, each with a block table.
        eos_token_ids: passed to the sampler, which uses the same slots.
        tracks_blocks: whether to note changes of the block tables for `take_changed_blocks`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks: int,
        num_groups: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        sampling: SamplerOptions,
        *,
        tracks_blocks: bool = False,
    ) -> None:
        self.num_slots = max_num_seqs
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        """Number of alternatives per prompt token; -1 if the request did not ask, or got them before a preemption."""
        self.second_texts = np.full(max_num_seqs, max_model_len + 1, dtype=np.int64)
        """Index of the first token that is of type 1: of a pair's second text."""
        self.num_pairs = 0
        """Number of requests with such tokens."""
        self.sampler = make_sampler(self.token_ids, eos_token_ids, device, sampling)
        self.slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._changed_blocks: list[tuple[int, int, int, int]] | None = [] if tracks_blocks else None

    def add(self, request: NewRequest) -> None:
        slot = self._free_slots.pop()
        self.slot_of[request.request_id] = slot
        count = len(request.token_ids)
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = request.num_computed_tokens
        self.num_blocks[:, slot] = 0
        self.append_blocks(slot, request.block_ids)
        pooling = request.pooling_params
        if pooling is not None and pooling.second_text is not None:
            self.second_texts[slot] = pooling.second_text
            self.num_pairs += 1
        params, num_prompt = request.sampling_params, count - request.num_output_tokens
        self.num_prompt[slot] = num_prompt
        asked = params.prompt_logprobs
        self.num_prompt_logprobs[slot] = -1 if asked is None or request.num_output_tokens else asked
        self.sampler.add(slot, params, request.token_ids, num_prompt)

    def append_blocks(self, slot: int, block_ids: BlockIds) -> None:
        for group, added in enumerate(block_ids):
            start = self.num_blocks[group, slot]
            self.block_tables[group, slot, start : start + len(added)] = added
            self.num_blocks[group, slot] = start + len(added)
            if self._changed_blocks is not None and added:
                self._changed_blocks.append((group, slot, int(start), len(added)))

    def take_changed_blocks(self) -> list[tuple[int, int, int, int]]:
        """Return the ranges (group, slot, first, count) of the block tables that changed since the last call."""
        changed, self._changed_blocks = self._changed_blocks, []
        assert changed is not None, "made without tracks_blocks"
        return changed

    def token_types(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Return the type of each token, int64 [T]; None: all are 0."""
        if not self.num_pairs:
            return None
        types: np.ndarray = (positions >= self.second_texts[slots]).astype(np.int64)
        return types

    def set_token(self, slot: int, token_id: int) -> None:
        """Write the token after the computed ones, which another pipeline stage has sampled."""
        position = self.num_computed[slot]
        self.token_ids[slot, position] = token_id
        self.num_tokens[slot] = max(self.num_tokens[slot], position + 1)

    def add_drafts(self, slot: int, token_ids: list[int]) -> None:
        """Write draft tokens after the known tokens, for the step that computes and verifies them."""
        start = self.num_tokens[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids

    def remove(self, request_id: str) -> int | None:
        """Free a request's slot and return it. Returns None for an unknown id: the request was never scheduled."""
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)
            if self.second_texts[slot] < self.token_ids.shape[1]:
                self.second_texts[slot] = self.token_ids.shape[1]
                self.num_pairs -= 1
            self.sampler.remove(slot)
        return slot

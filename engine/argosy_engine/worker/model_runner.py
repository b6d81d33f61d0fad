"""ModelRunner: turns a SchedulerOutput into tensors, runs the forward pass and samples.

It owns the KV cache tensor and the input batch. Requests with one new token come first in the flattened batch, because
the attention backend handles them together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.messages.model_runner_output import ModelRunnerOutput
from argosy_engine.messages.scheduler_output import SchedulerOutput
from argosy_engine.models.model_config import ModelConfig
from argosy_engine.models.registry import CausalLM
from argosy_engine.sample.logprobs import score_prompt
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.worker.input_batch import InputBatch
from argosy_engine.worker.kv_cache import allocate_kv_cache, layer_groups
from argosy_engine.worker.pending_step import PendingStep, PendingSteps
from argosy_engine.worker.pooler import Pooler


class ModelRunner:
    """Executes scheduled steps on one device."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        sampling: SamplerOptions,
    ) -> None:
        self.model = model
        self.pooler = Pooler(model)
        self.device = device
        self.block_size = block_size
        self.groups = layer_groups(model, block_size)
        self.kv_cache = allocate_kv_cache(model, self.groups, num_blocks, block_size, device)
        """One tensor [2, num_blocks, block_size, num_kv_heads, head_dim] per layer."""
        group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self._group_of_layer = [group_of[layer] for layer in range(len(group_of))]
        self.batch = InputBatch(
            max_num_seqs,
            max_model_len,
            -(-max_model_len // block_size) + 1,
            len(self.groups),
            config.eos_token_ids,
            device,
            sampling,
        )
        self._logprobs_mode = sampling.logprobs_mode
        self._pending_steps = PendingSteps()
        self.vocab_size = config.vocab_size

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step, including sampling unless it awaits a grammar bitmask."""
        self._pending_steps.land()
        self._apply(step)
        if not step.num_scheduled_tokens:
            return PendingStep(self.batch, self._pending_steps, ModelRunnerOutput([], []))
        # Requests with one new token come first; sorted() is stable, so the rest keeps the scheduler's order.
        scheduled = sorted(step.num_scheduled_tokens.items(), key=lambda item: item[1] > 1)
        request_ids = [request_id for request_id, _ in scheduled]
        slots = np.fromiter(
            (self.batch.slot_of[request_id] for request_id in request_ids), np.int64, len(scheduled)
        )
        query_lens = np.fromiter((count for _, count in scheduled), np.int64, len(scheduled))
        computed = self.batch.num_computed[slots]
        seq_lens, ends = computed + query_lens, np.cumsum(query_lens)
        token_ids, positions, meta = self._inputs(slots, query_lens, computed, seq_lens, ends)

        hidden = self.model.forward(token_ids, positions, self.kv_cache, meta)
        # Only requests that reach the end of their known tokens sample a next token.
        is_sampled = seq_lens >= self.batch.num_tokens[slots]
        self.batch.num_computed[slots] = seq_lens
        output = ModelRunnerOutput(request_ids, [[] for _ in request_ids], {}, {})
        output.pooler_output = self.pooler.pool(request_ids, hidden, query_lens, is_sampled)
        if (self.batch.num_prompt_logprobs[slots] >= 0).any():
            self._score_prompts(output, hidden, slots, query_lens, computed)
        if not is_sampled.any():
            return PendingStep(self.batch, self._pending_steps, output)
        rows = np.flatnonzero(is_sampled).tolist()
        last_rows, first_positions = ends[is_sampled] - 1, seq_lens[is_sampled]
        drafts: list[list[int]] = []
        if step.scheduled_spec_token_ids:
            drafts = [step.scheduled_spec_token_ids.get(request_ids[row], []) for row in rows]
            counts = np.array([len(each) for each in drafts])
            first_positions = first_positions - counts
            last_rows = np.concatenate(
                [np.arange(last - count, last + 1) for last, count in zip(last_rows, counts, strict=True)]
            )
        if len(last_rows) < len(hidden):
            hidden = hidden.index_select(0, self._tensor(last_rows))
        logits = self.model.logits(hidden)
        pending = PendingStep(
            self.batch, self._pending_steps, output, logits, rows, slots[is_sampled], first_positions, drafts
        )
        if not step.awaits_grammar:
            pending.sample(step.grammar)
        return pending

    def _apply(self, step: SchedulerOutput) -> None:
        """Apply the scheduler's diff to the input batch."""
        for request_id in step.finished_request_ids:
            slot = self.batch.remove(request_id)
            if slot is not None:
                self._pending_steps.free(slot)
            self.pooler.remove(request_id)
        for request_id, block_ids in step.new_block_ids.items():
            self.batch.append_blocks(self.batch.slot_of[request_id], block_ids)
        for request in step.new_requests:
            self.batch.add(request)
            if request.pooling_params is not None:
                self.pooler.add(request.request_id, request.pooling_params)
        for request_id, drafts in step.scheduled_spec_token_ids.items():
            self.batch.add_drafts(self.batch.slot_of[request_id], drafts)

    def _inputs(
        self,
        slots: np.ndarray,
        query_lens: np.ndarray,
        computed: np.ndarray,
        seq_lens: np.ndarray,
        ends: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Build the flattened token ids [T], positions [T] and attention metadata of a step."""
        batch = self.batch
        num_decodes = int((query_lens == 1).sum())
        slot_of, positions = slots, computed
        if num_decodes < len(slots):
            slot_of = np.repeat(slots, query_lens)
            positions = np.arange(len(slot_of)) + np.repeat(seq_lens - ends, query_lens)
        token_ids = batch.token_ids[slot_of, positions]
        block_of, offsets = np.divmod(positions, self.block_size)
        max_blocks = int(-(-seq_lens.max() // self.block_size))
        starts = np.zeros(len(slots) + 1, np.int32)
        starts[1:] = ends
        lens = seq_lens.astype(np.int32)
        query_start_loc, lens_tensor = self._tensor(starts), self._tensor(lens)
        all_positions = self._tensor(positions)
        metas = [
            AttentionMetadata(
                num_decodes=num_decodes,
                query_start_loc=query_start_loc,
                seq_lens=lens_tensor,
                positions=all_positions,
                slot_mapping=self._tensor(
                    tables[slot_of, block_of].astype(np.int64) * self.block_size + offsets
                ),
                block_table=self._tensor(tables[slots, :max_blocks]),
                query_start_loc_cpu=starts,
                seq_lens_cpu=lens,
            )
            for tables in batch.block_tables
        ]
        meta = metas[0]
        if len(metas) > 1:
            meta = replace(meta, layers=tuple(metas[group] for group in self._group_of_layer))
        tokens = self._tensor(token_ids.astype(np.int64))
        self._pending_steps.fill(tokens, slots, ends - 1)
        return tokens, all_positions, meta

    def _score_prompts(
        self,
        output: ModelRunnerOutput,
        hidden: torch.Tensor,
        slots: np.ndarray,
        query_lens: np.ndarray,
        computed: np.ndarray,
    ) -> None:
        """Compute log probabilities of this step's prompt tokens for the requests that asked for them."""
        batch = self.batch
        starts = np.cumsum(query_lens) - query_lens
        for row in np.flatnonzero(batch.num_prompt_logprobs[slots] >= 0).tolist():
            slot, first = slots[row], computed[row]
            # A position's hidden state predicts the next token, so the last prompt token's predicts output.
            count = min(first + query_lens[row], batch.num_prompt[slot] - 1) - first
            if count > 0:
                scored = score_prompt(
                    self.model.logits,
                    hidden[starts[row] : starts[row] + count],
                    self._tensor(batch.token_ids[slot, first + 1 : first + 1 + count].astype(np.int64)),
                    int(batch.num_prompt_logprobs[slot]),
                    self.vocab_size,
                    self._logprobs_mode,
                )
                output.prompt_logprobs[output.request_ids[row]] = int(first), scored

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

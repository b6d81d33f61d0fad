"""ModelRunner: turns a SchedulerOutput into tensors, runs the forward pass and samples.

It allocates the KV cache, which the model's layers hold, and owns the input batch. On the host a step becomes numpy
arrays (`step_arrays`), whatever the device; `step_inputs` makes tensors of them on a CPU, `device_inputs` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from argosy_engine.attention.kv_cache_spec import KVCacheGroup
from argosy_engine.distributed.lockstep import Round
from argosy_engine.layers.token_exchange import TokenExchange
from argosy_engine.messages.model_runner_output import ModelRunnerOutput
from argosy_engine.messages.scheduler_output import SchedulerOutput
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.models.registry import CausalLM
from argosy_engine.sample.logprobs import score_prompt
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.worker.cuda_graphs import DecodeGraphs, GraphApi, TorchGraphs
from argosy_engine.worker.device_inputs import DeviceInputs
from argosy_engine.worker.device_runtime import CudaRuntime, DeviceRuntime
from argosy_engine.worker.host_copies import HostCopies
from argosy_engine.worker.input_batch import InputBatch
from argosy_engine.worker.kv_cache import bind_kv_cache, layer_groups
from argosy_engine.worker.pending_step import PendingStep, PendingSteps
from argosy_engine.worker.pipeline import Pipeline
from argosy_engine.worker.pooler import Pooler
from argosy_engine.worker.step_arrays import StepArrays, empty_step, flatten_step
from argosy_engine.worker.step_inputs import HostInputs, StepInputs, StepTensors

_NO_TOKEN = 0
"""Ends a prompt of a pooling model for the scheduler, which discards it."""


class ModelRunner:
    """Executes scheduled steps on one device.

    Args:
        max_num_batched_tokens: most tokens of a step.
        runtime: copies to and from the device; default: CUDA's on a GPU. A CPU needs none.
        groups: KV cache groups; default: those of the model's layers.
        pipeline: runs the model as one stage of several; None if it is the whole model.
        exchange: of the model's sparse layers, if several engine cores share experts. A step that the cores have not
            agreed on (of a start) must be the same on all of them.
        can_lose_steps: whether a step for which there is no memory is answered as lost, rather than raised: only if no
            other worker computes it as well, because that one would wait for this one.
        num_states: blocks with states, if the model has any.
        requires_graphs: whether CUDA graphs that cannot be captured are an error; see `DecodeGraphs`.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device,
        sampling: SamplerOptions,
        runtime: DeviceRuntime | None = None,
        groups: Sequence[KVCacheGroup] | None = None,
        pipeline: Pipeline | None = None,
        exchange: TokenExchange | None = None,
        can_lose_steps: bool = True,
        requires_graphs: bool = False,
        num_states: int = 0,
    ) -> None:
        self.model = model
        self._requires_graphs = requires_graphs
        self._pipeline = pipeline
        self._exchange = exchange
        self._samples = pipeline is None or pipeline.is_last
        """Whether this is the last pipeline stage. Others learn sampled tokens from the scheduler."""
        self._pools = config.pooling is not None
        """Whether the model has no output head, so that nothing is sampled."""
        self.pooler = Pooler(model, config.pooling)
        self.device = device
        self.block_size = block_size
        self.groups = tuple(groups or layer_groups(model, block_size))
        bind_kv_cache(model, self.groups, num_blocks, block_size, device, num_states)
        if runtime is None and device.type == "cuda":
            runtime = CudaRuntime(device)
        self.batch = InputBatch(
            max_num_seqs,
            max_model_len,
            -(-max_model_len // block_size) + 1,
            max(len(self.groups), 1),  # the inputs of a step have metadata of one, though none may be used
            config.eos_token_ids,
            device,
            sampling,
            tracks_blocks=runtime is not None,
        )
        self._inputs: StepInputs = HostInputs(self.batch, block_size)
        if runtime is not None:
            self._inputs = DeviceInputs(
                self.batch,
                block_size,
                max_num_tokens=max_num_batched_tokens,
                device=device,
                runtime=runtime,
            )
        self._logprobs_mode = sampling.logprobs_mode
        copies = None if runtime is None else HostCopies(runtime)
        self._pending_steps = PendingSteps(self.batch, self._inputs, copies, can_lose_steps=can_lose_steps)
        self._graphs: DecodeGraphs | None = None
        self.vocab_size = config.vocab_size

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step, including sampling unless it awaits a grammar bitmask.

        Raises:
            torch.OutOfMemoryError: there is no memory for it, and it may not be lost.
        """
        self._pending_steps.land()
        self._apply(step)
        if not step.num_scheduled_tokens:
            return PendingStep(self._pending_steps, ModelRunnerOutput([], []))
        try:
            return self._launch(step)
        except torch.OutOfMemoryError as error:
            return PendingStep(self._pending_steps, self._pending_steps.lost(error))

    def _launch(self, step: SchedulerOutput) -> PendingStep:
        arrays = flatten_step(self.batch, step, self._pending_steps.slots())
        hidden, tensors = self._compute(arrays, step.round)
        slots, sampled = arrays.slots, arrays.sampled
        self.batch.num_computed[slots] = arrays.seq_lens
        if not self._samples:
            return PendingStep(self._pending_steps, ModelRunnerOutput([], []))
        output = ModelRunnerOutput(arrays.request_ids, [[] for _ in arrays.request_ids], {}, {})
        output.pooler_output = self.pooler.pool(arrays, hidden)
        if not self._pools and (self.batch.num_prompt_logprobs[slots] >= 0).any():
            self._score_prompts(output, hidden, arrays)
        if self._pools:
            for row in sampled.rows:
                output.sampled_token_ids[row] = [_NO_TOKEN]
        if not sampled.rows or self._pools:
            return PendingStep(self._pending_steps, output)
        if tensors.sampled_tokens is not None:
            hidden = hidden.index_select(0, tensors.sampled_tokens)
        logits = self.model.logits(hidden)
        pending = PendingStep(self._pending_steps, output, logits, sampled, tensors.staged_rows)
        if not step.awaits_grammar:
            pending.sample(step.grammar)
        return pending

    @torch.inference_mode()
    def lend_experts(self, step: Round) -> None:
        """Launch this rank's part of a step in which it has no tokens."""
        assert self._exchange is not None
        if self._graphs is None or self._graphs.run(empty_step(), step) is None:
            self._exchange.lend_experts(step.num_rows)

    @torch.inference_mode()
    def capture_graphs(
        self,
        sizes: Sequence[int],
        api: GraphApi | None = None,
        on_captured: Callable[[], None] = lambda: None,
    ) -> bool:
        """Capture the forward passes of decode steps as CUDA graphs; see `DecodeGraphs.capture`.

        May be called again with more sizes. Needs a runtime, and no request.

        Args:
            api: default: torch's.
            on_captured: called after each.
        """
        if self._graphs is None:
            assert isinstance(self._inputs, DeviceInputs)
            self._graphs = DecodeGraphs(
                self._inputs, self._forward, api or TorchGraphs(), is_required=self._requires_graphs
            )
        return self._graphs.capture(sizes, on_captured)

    def _compute(self, arrays: StepArrays, step: Round | None) -> tuple[torch.Tensor, StepTensors]:
        """Run the forward pass; return hidden states [T, hidden_size] and what they were computed from.

        Args:
            step: what all engine cores have agreed on, if they share experts.
        """
        if self._pipeline is not None:
            self._pipeline.receive(arrays.num_tokens)
        computed = self._graphs.run(arrays, step) if self._graphs is not None else None
        if computed is None:
            tensors = self._inputs.tensors(arrays)
            computed = self._forward(tensors, None if step is None else step.num_rows), tensors
        if self._pipeline is not None:
            self._pipeline.send(computed[0])
        return computed

    def _forward(self, tensors: StepTensors, num_rows: int | None = None) -> torch.Tensor:
        """Run the forward pass. For num_rows see `TokenExchange.begin`."""
        if self._exchange is not None:
            self._exchange.begin(num_rows)
        forward = self.model.forward if self._pipeline is None else self._pipeline.forward
        return forward(tensors.inputs)

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
                self.pooler.add(request.request_id, request.pooling_params.replace(second_text=None))
        if not self._samples:
            for request_id, token_id in step.new_token_ids.items():
                self.batch.set_token(self.batch.slot_of[request_id], token_id)
        for request_id, drafts in step.scheduled_spec_token_ids.items():
            self.batch.add_drafts(self.batch.slot_of[request_id], drafts)

    def _score_prompts(
        self,
        output: ModelRunnerOutput,
        hidden: torch.Tensor,
        arrays: StepArrays,
    ) -> None:
        """Compute log probabilities of this step's prompt tokens for the requests that asked for them."""
        batch, slots, computed, query_lens = self.batch, arrays.slots, arrays.computed, arrays.query_lens
        starts = arrays.ends - query_lens
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

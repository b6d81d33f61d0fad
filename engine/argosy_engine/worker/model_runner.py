"""ModelRunner: turns a SchedulerOutput into tensors, runs the forward pass and samples.

It allocates the KV cache, which the model's layers hold, and owns the input batch. On the host a step becomes numpy
arrays, whatever the device, and then tensors (`input_batch` on a CPU, `device_inputs` on a GPU). A model may be one
stage of several (`Pipeline`), and a request may ask for vectors instead of tokens (`Pooler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import Attention, DeepstackFeatures, ModelInputs, StateLayer
from argosy_engine.attention.kv_cache_spec import (
    KVCacheGroup,
    attention_groups,
    block_bytes,
    group_layers,
)
from argosy_engine.distributed.lockstep import Round
from argosy_engine.distributed.parallel_state import (
    Communicator,
    LocalCommunicator,
    packed_reasons,
    unpacked_reasons,
)
from argosy_engine.layers.experts import TokenExchange
from argosy_engine.messages import EncoderInput, ModelRunnerOutput, NewRequest, SchedulerOutput
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.model_use import PoolingSpec
from argosy_engine.model_configs.vision_config import LargestImage
from argosy_engine.models.decoder import ScoringModel
from argosy_engine.models.loader import LoadedImages
from argosy_engine.models.registry import CausalLM
from argosy_engine.native.library import allocate
from argosy_engine.params import PoolingParams
from argosy_engine.sample.sampler import SamplerOptions, score_prompt
from argosy_engine.worker.cuda_graphs import GraphApi, StepGraphs, TorchGraphs
from argosy_engine.worker.device_inputs import DeviceInputs
from argosy_engine.worker.device_runtime import CudaRuntime, DeviceRuntime, HostCopies
from argosy_engine.worker.image_inputs import EmbeddingModel, ImageInputs, ImagePart, rows_of
from argosy_engine.worker.input_batch import (
    HostInputs,
    InputBatch,
    StepArrays,
    StepInputs,
    StepTensors,
    empty_step,
    flatten_step,
)
from argosy_engine.worker.pending_step import PendingStep, PendingSteps


class Pipeline:
    """Runs one stage of a model. Every stage is given the same steps in the same order.

    It passes hidden states from the stage before to this one, and on to the stage after. What arrives is written to one
    buffer, so that a CUDA graph of a stage's layers finds it where it was captured. The exchange is no part of a graph.

    Args:
        model: the layers of this stage.
        communicator: of the ranks that hold the stages, in their order.
        hidden_size: width of the states that stages exchange, in the model's dtype.
        max_num_tokens: most tokens of a step.
        num_deepstack: layers from this stage's first on that add features of images (`DeepstackFeatures`).
    """

    def __init__(
        self,
        model: CausalLM,
        communicator: Communicator,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_tokens: int,
        num_deepstack: int = 0,
    ) -> None:
        self._model = model
        self._num_deepstack = num_deepstack
        self._communicator = communicator
        self._device = device
        self.is_last = communicator.rank == communicator.size - 1
        """Whether this stage samples."""
        self.is_first = communicator.rank == 0
        """Whether this stage embeds tokens and images."""
        self._received: torch.Tensor | None = None
        """[max_num_tokens, hidden_size], changed by the layers. Rows of padding keep what was there, from zeros on."""
        if communicator.rank:
            self._received = torch.zeros(max_num_tokens, hidden_size, dtype=dtype, device=device)

    def receive(self, num_tokens: int) -> None:
        """Receive what the stage before has computed of a step of `num_tokens`."""
        if self._received is not None:
            self._communicator.receive(self._received[:num_tokens], self._communicator.rank - 1)

    def receive_deepstack(self, parts: Sequence[ImagePart]) -> DeepstackFeatures | None:
        """Receive, after `receive`, what this stage and those after it add to a step's tokens of images; None: nothing,
        or this is the first stage."""
        if self._received is None or not self._num_deepstack:
            return None
        rows = rows_of(parts, self._received.device)
        features = self._received.new_empty(self._num_deepstack, len(rows), self._received.shape[-1])
        return DeepstackFeatures(rows, self._communicator.receive(features, self._communicator.rank - 1))

    def share_failures(self, items: Sequence[EncoderInput], failed: dict[str, str]) -> dict[str, str]:
        """Tell all stages which items of a step the first one could not encode; return them.

        Args:
            failed: why, by identifier; matters on the first stage.
        """
        reasons = packed_reasons([failed.get(item.identifier) for item in items]).to(self._device)
        if self._communicator.rank:
            self._communicator.receive(reasons, self._communicator.rank - 1)
        if not self.is_last:
            self._communicator.send(reasons, self._communicator.rank + 1)
        named = zip(items, unpacked_reasons(reasons.cpu()), strict=True)
        return {item.identifier: reason for item, reason in named if reason is not None}

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute the stage's hidden states [T, hidden_size] from what it has received, valid until the next `receive`.

        Argument: `CausalLM.forward`.
        """
        if self._received is not None:
            inputs = replace(inputs, hidden=self._received[: len(inputs.token_ids)])
        return self._model.forward(inputs)

    def send(self, hidden: torch.Tensor, deepstack: DeepstackFeatures | None = None) -> None:
        """Send hidden states [T, hidden_size] to the stage after, if there is one, and what its layers add."""
        if self.is_last:
            return
        self._communicator.send(hidden, self._communicator.rank + 1)
        if deepstack is not None and len(deepstack.features) > len(self._model.layers):
            later = deepstack.features[len(self._model.layers) :]
            self._communicator.send(later, self._communicator.rank + 1)


def layer_groups(model: CausalLM, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Group the model's layers by what each says that it keeps."""
    attention = [layer.kv_cache_spec(block_size) for layer in model.attention_layers]
    return group_layers([*attention, *(layer.kv_cache_spec() for layer in state_layers(model))])


def state_layers(model: CausalLM) -> Sequence[StateLayer]:
    """Return the layers that keep a state per request; most models have none."""
    layers: Sequence[StateLayer] = getattr(model, "state_layers", ())
    return layers


def bind_kv_cache(
    model: CausalLM,
    groups: Sequence[KVCacheGroup],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    num_states: int = 0,
) -> None:
    """Allocate the pool and give each layer its view of it, in the shape that it asks for (`kv_cache_shape`).

    The i-th layers of all groups view the same bytes, because a block belongs to one group at a time. If groups differ
    in the size of a page, a block's bytes are in one place, and the layers' views are strided. On a CPU the memory is
    not committed until it is used. Layers with states get tensors of their own, for `num_states` blocks.
    """
    for state in state_layers(model):
        shapes = [((num_states, *shape), dtype) for shape, dtype in state.tensors]
        state.bind([_zeros(*each, device) for each in shapes], block_size, len(groups) - 1)
    attention = attention_groups(groups)
    if not any(group.layers for group in attention):
        return
    layers = model.attention_layers
    page_bytes, *others = {group.spec.page_bytes for group in attention}
    if others:
        storage = _zeros((num_blocks, block_bytes(attention)), torch.uint8, device)
        for index, group in enumerate(attention):
            for place, layer in enumerate(layers[each] for each in group.layers):
                pages = storage[:, place * group.spec.page_bytes : (place + 1) * group.spec.page_bytes]
                _, *shape = layer.kv_cache_shape(num_blocks, block_size)
                assert isinstance(layer, Attention)
                view = pages.view(layer.kv_cache_dtype).unflatten(1, (2, *shape[1:]))
                layer.bind(view.transpose(0, 1), index)
        return
    whole = max(len(group.layers) for group in attention), num_blocks * page_bytes
    storage = _zeros(whole, torch.uint8, device)
    for index, group in enumerate(attention):
        for pages, layer in zip(storage, (layers[each] for each in group.layers), strict=False):
            view = pages.view(layer.kv_cache_dtype).view(layer.kv_cache_shape(num_blocks, block_size))
            layer.bind(view, index)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return allocate(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


_OF_GENERATING = PoolingSpec()


class Pooler:
    """Pools the hidden states of a prompt into one vector, or one for each token.

    A prompt may be computed in chunks, so the pooler keeps what it needs of earlier ones between steps, in float32: the
    sum of the states for their mean, the first state, or all of them.

    Args:
        spec: how the model pools; None: it generates, and may be asked for vectors as well.
    """

    def __init__(self, model: CausalLM, spec: PoolingSpec | None = None) -> None:
        self._model = model
        self._spec = spec or _OF_GENERATING
        self._params: dict[str, PoolingParams] = {}
        self._kept: dict[str, torch.Tensor] = {}
        """For a mean, float32 [1 + pooled_size]: the number of states so far, and their sum; for the first token's
        state, that, float32 [pooled_size]."""
        self._chunks: dict[str, list[torch.Tensor]] = {}
        """For tasks of tokens, their states so far, float32 [tokens, pooled_size] each."""

    def add(self, request_id: str, params: PoolingParams) -> None:
        """Add a request, whose parameters are resolved (`frontend.pooling.resolved_params`)."""
        self._params[request_id] = params

    @property
    def has_requests(self) -> bool:
        """Whether any request wants vectors. What it keeps of hidden states must outlive the step."""
        return bool(self._params)

    def remove(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._params.pop(request_id, None)
        self._kept.pop(request_id, None)
        self._chunks.pop(request_id, None)

    def pool(self, step: StepArrays, hidden: torch.Tensor) -> dict[str, list[float]]:
        """Return the vectors of the requests whose prompts are complete with this step; those of a prompt's tokens one
        after the other.

        Args:
            hidden: [T, hidden_size], states of the step's tokens before the final norm.
        """
        if not self._params:
            return {}
        complete = set(step.sampled.rows)
        last: dict[str, int] = {}
        """Of complete prompts that want the last token's state, its index."""
        kept: list[str] = []
        vectors: dict[str, list[float]] = {}
        for row, request_id in enumerate(step.request_ids):
            params = self._params.get(request_id)
            if params is None:
                continue
            end = int(step.ends[row])
            start = end - int(step.query_lens[row])
            if params.is_token_wise:
                self._chunks.setdefault(request_id, []).append(self._states(hidden[start:end]))
                if row in complete:
                    states = torch.cat(self._chunks.pop(request_id))
                    vectors[request_id] = self._results(states, params).flatten().tolist()
                continue
            if params.pooling_type == "mean":
                self._add_to_sum(request_id, hidden[start:end])
            elif params.pooling_type == "cls" and not step.computed[row]:
                self._kept[request_id] = self._states(hidden[start : start + 1])[0]
            if row in complete:
                if params.needs_every_token:
                    kept.append(request_id)
                else:
                    last[request_id] = end - 1
        if last:
            rows = torch.tensor(list(last.values()), device=hidden.device)
            self._finish(list(last), self._states(hidden.index_select(0, rows)), vectors)
        if kept:
            self._finish(kept, torch.stack([self._pooled(request_id) for request_id in kept]), vectors)
        return vectors

    def _states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.last_hidden_state(hidden).float()

    def _add_to_sum(self, request_id: str, hidden: torch.Tensor) -> None:
        states = self._states(hidden)
        count_and_sum = torch.cat((states.new_tensor([len(states)]), states.sum(dim=0)))
        earlier = self._kept.get(request_id)
        self._kept[request_id] = count_and_sum if earlier is None else earlier + count_and_sum

    def _pooled(self, request_id: str) -> torch.Tensor:
        """Return the vector [pooled_size] of a complete prompt."""
        kept = self._kept.pop(request_id)
        return kept[1:] / kept[0] if self._params[request_id].pooling_type == "mean" else kept

    def _finish(self, request_ids: list[str], vectors: torch.Tensor, into: dict[str, list[float]]) -> None:
        """Make the results of vectors [R, pooled_size]."""
        by_params: dict[PoolingParams, list[int]] = {}
        for row, request_id in enumerate(request_ids):
            by_params.setdefault(self._params[request_id], []).append(row)
        for params, rows in by_params.items():
            some = vectors if len(by_params) == 1 else vectors[rows]
            result = self._results(some, params).tolist()
            into.update(zip((request_ids[row] for row in rows), result, strict=True))

    def _results(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        is_classified = params.task in ("classify", "token_classify")
        return self._scores(vectors, params) if is_classified else _embeddings(vectors, params)

    def _scores(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return scores [R, num_labels], or what the activation makes of them."""
        spec, model = self._spec, cast(ScoringModel, self._model)
        scores = (model.scores(vectors) - spec.logit_mean) / spec.logit_sigma
        if not params.use_activation:
            return scores
        match spec.activation:
            case "softmax":
                return scores.softmax(dim=-1)
            case "sigmoid":
                return scores.sigmoid()
        return scores


def _embeddings(vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    vectors = vectors[:, : params.dimensions]
    return F.normalize(vectors, dim=-1) if params.use_activation else vectors


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
        requires_graphs: whether CUDA graphs that cannot be captured are an error; see `StepGraphs`.
        images: what the model sees images by; None: only texts are served.
        ranks: those that share the model's layers; None: this one has them alone.
        shares_images: whether each of them encodes some images of a step, instead of all.
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
        images: LoadedImages | None = None,
        ranks: Communicator | None = None,
        shares_images: bool = False,
    ) -> None:
        self.model = model
        ranks = ranks or LocalCommunicator()
        self._images = None
        if images is not None:
            self._images = ImageInputs(images, max_num_seqs, ranks, shares_items=shares_images)
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
        self._graphs: StepGraphs | None = None
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
        failed = {} if self._images is None else self._images.encode(step)
        if self._pipeline is not None and step.encoder_inputs:
            failed = self._pipeline.share_failures(step.encoder_inputs, failed)
        arrays = flatten_step(self.batch, step, self._pending_steps.slots())
        image_parts: Sequence[ImagePart] = ()
        if self._images is not None:
            image_parts = self._images.parts(arrays)
            arrays.rotary_rows = self._images.rotary_rows(arrays)
            arrays.key_ends = self._images.key_ends(arrays, image_parts)
        hidden, tensors = self._compute(arrays, step.round, image_parts)
        slots, sampled = arrays.slots, arrays.sampled
        self.batch.num_computed[slots] = arrays.seq_lens
        if not self._samples:
            return PendingStep(self._pending_steps, ModelRunnerOutput([], []))
        output = ModelRunnerOutput(arrays.request_ids, [[] for _ in arrays.request_ids], {}, {})
        output.failed_encodings = failed
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
    def encode_largest(self, image: LargestImage) -> None:
        """Encode an image of one colour, of which nothing is kept."""
        if self._images is not None:
            self._images.encode_largest(image)

    @property
    def has_key_ends(self) -> bool:
        """Whether tokens of an image attend to all of it."""
        return self._images is not None and self._images.is_bidirectional

    def with_dummy_image(self, request: NewRequest) -> NewRequest:
        """Return a dummy request whose tokens are all those of an image, if images are served."""
        return request if self._images is None else self._images.with_dummy(request)

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
        *,
        mixed: Sequence[int] = (),
    ) -> bool:
        """Capture the forward passes of decode steps as CUDA graphs; see `StepGraphs.capture`.

        May be called again with more sizes. Needs a runtime, and no request.

        Args:
            sizes: numbers of requests.
            api: default: torch's.
            on_captured: called after each.
            mixed: numbers of tokens of mixed steps to capture; only for models whose forward pass depends on lengths
                in its attention alone. They come first, being the largest.

        Returns:
            Whether all could be captured.
        """
        if self._graphs is None:
            assert isinstance(self._inputs, DeviceInputs)
            self._graphs = StepGraphs(
                self._inputs, self._forward, api or TorchGraphs(), is_required=self._requires_graphs
            )
        has_mixed = not mixed or self._graphs.capture(mixed, on_captured, is_mixed=True)
        return self._graphs.capture(sizes, on_captured) and has_mixed

    def _compute(
        self, arrays: StepArrays, step: Round | None, image_parts: Sequence[ImagePart]
    ) -> tuple[torch.Tensor, StepTensors]:
        """Run the forward pass; return hidden states [T, hidden_size] and what they were computed from.

        Args:
            step: what all engine cores have agreed on, if they share experts.
            image_parts: what the step computes of images.
        """
        if self._pipeline is not None:
            self._pipeline.receive(arrays.num_tokens)
        computed = None
        if self._graphs is not None and not image_parts:
            computed = self._graphs.run(arrays, step, allows_mixed=not self.pooler.has_requests)
        if computed is None:
            tensors = self._inputs.tensors(arrays)
            if image_parts:
                tensors = tensors._replace(inputs=self._with_images(tensors.inputs, image_parts))
            computed = self._forward(tensors, None if step is None else step.num_rows), tensors
        if self._pipeline is not None:
            self._pipeline.send(computed[0], computed[1].inputs.deepstack)
        return computed

    def _with_images(self, inputs: ModelInputs, parts: Sequence[ImagePart]) -> ModelInputs:
        """Return the inputs with what the step computes of images: on the first stage in place of embeddings."""
        assert self._images is not None
        if self._pipeline is None or self._pipeline.is_first:
            return self._images.embedded(cast(EmbeddingModel, self.model), inputs, parts)
        return replace(inputs, deepstack=self._pipeline.receive_deepstack(parts))

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
                if self._images is not None:
                    self._images.remove(slot)
            self.pooler.remove(request_id)
        for request_id, block_ids in step.new_block_ids.items():
            self.batch.append_blocks(self.batch.slot_of[request_id], block_ids)
        for request in step.new_requests:
            self.batch.add(request)
            if self._images is not None:
                self._images.add(self.batch.slot_of[request.request_id], request)
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

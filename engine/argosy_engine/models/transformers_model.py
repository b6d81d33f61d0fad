"""TransformersModel and TransformersEncoder: a decoder of transformers' modelling code over our KV cache and attention
backends, and an encoder (BERT and its like) for embeddings and labels.

The attention function (`transformers_attention`) gives a decoder's q, k and v, which the model has rotated, to an
`Attention` layer with the cache of that layer; the requests of a step are one row of tokens. What attention a model
computes was found before (`transformers_follow`). In an encoder's step whole prompts lie one behind the other; each
token attends to its own prompt only, and there is no KV cache. An encoder whose attention does not go through
transformers' interface computes one prompt after the other.

Nothing that comes with a checkpoint is executed. Design: vLLM's `model_executor/models/transformers`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from argosy_engine.attention.backend import (
    Attention,
    AttentionBackend,
    AttentionWeights,
    ModelInputs,
    StateLayer,
)
from argosy_engine.errors import ConfigError
from argosy_engine.layers.layer_compiler import CompilableLayer
from argosy_engine.model_configs.transformers_config import EncoderConfig, TransformersConfig
from argosy_engine.models.transformers_attention import (
    STEP,
    AttendingLayer,
    AttentionCall,
    StateCall,
    Step,
    StepStates,
    attending,
    cache_argument,
    running,
    set_attention,
    use_state_kernels,
)
from argosy_engine.models.transformers_classes import body_of
from argosy_engine.models.transformers_kernels import CalledLinears


def _running_states() -> StepStates | None:
    """Return the states of the step that runs in this thread, if one does."""
    step = running()
    return step.states if isinstance(step, Step) else None


class _OwnPositions(TorchFunctionMode):
    """Gives a model that numbers the tokens of a step itself (Llama 4 without RoPE) their positions instead."""

    def __init__(self, positions: torch.Tensor, step: Step) -> None:
        super().__init__()
        self._positions = positions
        self._step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.arange and args == (len(self._positions),) and not self._step.is_attending:
            return self._positions.clone()
        return func(*args, **(kwargs or {}))


class _Headed:
    """A model of transformers' whose head can be given other states than its body's.

    Args:
        model: in evaluation mode, on its device.
        body: of the model.
    """

    checkpoint_prefix: ClassVar[str] = ""
    ignored_tensors: ClassVar[Sequence[str]] = ()

    def __init__(self, model: PreTrainedModel, body: nn.Module) -> None:
        self.model = model
        self._body: Any = body
        self._given: torch.Tensor | None = None
        self._output: type[Any] | None = None
        """Of the body."""
        self._pooler: nn.Module | None = None
        """The part of the head that transformers has in the body (BERT)."""
        self._run_body = body.forward
        body.forward = self._forward_body

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _head(self, states: torch.Tensor, **given: Any) -> torch.Tensor:
        """Return what the model's own head makes of states [rows, tokens, hidden_size]."""
        self._given = states
        try:
            ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
            logits: torch.Tensor = self.model(input_ids=ids, **given).logits
        finally:
            self._given = None
        return logits

    def _forward_body(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._run_body(*args, **kwargs)
        assert self._output is not None
        more = {} if self._pooler is None else {"pooler_output": self._pooler(self._given)}
        return self._output(last_hidden_state=self._given, **more)


class TransformersModel(_Headed):
    """One of transformers' causal models, loaded.

    Args:
        config: with the attention that `follow` has found.
        model: in evaluation mode, on its device.
        label_head: float32 [num_labels, hidden_size], of a model that classifies.
        expected: `reference_outputs` of `probe_prompts` by the whole model, if this is a rank's part of it.
        tensor_parallel_size: number of ranks.
    """

    def __init__(
        self,
        config: TransformersConfig,
        model: PreTrainedModel,
        backend: AttentionBackend,
        label_head: torch.Tensor | None = None,
        expected: Sequence[torch.Tensor] | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        self._has_head = config.pooling is None
        super().__init__(model, body_of(model, has_head=self._has_head))
        self._label_head = label_head
        self._config = config
        self.expected = expected
        self._numbers_tokens = config.numbers_tokens
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        self._attending = []
        for (name, _, value_dim, sinks), params in zip(config.calls, config.attention, strict=True):
            if tensor_parallel_size > 1:
                params = params.of_rank(tensor_parallel_size)
            weights = AttentionWeights()
            if sinks is not None:
                weights = weights._replace(sinks=parameters[sinks].detach().float())
            self._attending.append(AttendingLayer(modules[name], params, backend, weights, value_dim))
        self.state_layers = [StateLayer(params, model.dtype) for params in config.state_layers]
        self._state_calls = [
            StateCall(modules[name], layer, kept, _running_states)
            for (name, kept), layer in zip(config.state_calls, self.state_layers, strict=True)
        ]
        self._linears = CalledLinears(model, model.dtype)

    @property
    def layers(self) -> Sequence[CompilableLayer]:
        return ()

    @property
    def attention_layers(self) -> list[Attention]:
        return [call.attention for call in self._attending]

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the embeddings of a step's tokens, [T, hidden_size]."""
        embedding: Any = self.model.get_input_embeddings()
        embedded: torch.Tensor = embedding(inputs.token_ids)
        return embedded

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size], after the final norm."""
        given: dict[str, torch.Tensor] = {"input_ids": inputs.token_ids.unsqueeze(0)}
        if inputs.hidden is not None:
            given = {"inputs_embeds": inputs.hidden.unsqueeze(0)}
        step = Step(self._attending, inputs.meta, StepStates(inputs.meta) if self.state_layers else None)
        own = _OwnPositions(inputs.positions, step) if self._numbers_tokens else contextlib.nullcontext()
        with attending(step), own:
            output = self._body(
                **given,
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                **cache_argument(self._body, step.states),
            )
        self._output = type(output)
        hidden: torch.Tensor = output[0]
        return hidden.squeeze(0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the model's own output head, with all that it does to logits."""
        assert self._has_head, "a pooling model has no output head"
        return self._head(hidden.unsqueeze(0), use_cache=False).squeeze(0)

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, num_labels] of vectors [R, hidden_size], both float32, before any activation."""
        assert self._label_head is not None, "embeddings have no scores"
        return F.linear(vectors, self._label_head)

    def compared(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a probe compares of hidden states [T, hidden_size], in float32: logits, or the states of a model
        without a head."""
        return (self.logits(hidden) if self._has_head else hidden).float()

    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the same as `compared` of one request with transformers' own attention, without a cache."""
        return reference_outputs(self.model, self._config, token_ids)

    def check_states(self) -> bool:
        """Find out how layers with states continue them, after a reference pass; return whether any takes one token at
        a time.

        Raises:
            ConfigError: one cannot continue a state.
        """
        for call in self._state_calls:
            if (reason := call.check()) is not None:
                raise ConfigError(reason)
        return any(call.continues_singly for call in self._state_calls)

    def use_kernels(self) -> None:
        """Let our kernels compute what they can of the modules that have been called, on a CPU."""
        if self.model.device.type == "cpu":
            use_state_kernels(self.model, _running_states)
        self._linears.use_kernels(self._attending)


def reference_outputs(
    model: PreTrainedModel, config: TransformersConfig, token_ids: torch.Tensor
) -> torch.Tensor:
    """Compute logits [T, vocab_size], or of a model without a head states [T, hidden_size], of one request with
    transformers' own attention, without a cache; float32."""
    set_attention(model, "eager")
    given: dict[str, torch.Tensor] = {}
    if config.wrapper is None:  # a wrapper numbers tokens in ways of its own
        given["position_ids"] = torch.arange(len(token_ids), device=token_ids.device).unsqueeze(0)
    try:
        output = model(input_ids=token_ids.unsqueeze(0), use_cache=False, **given)
    finally:
        set_attention(model, STEP)
    found: torch.Tensor = output.logits if config.pooling is None else output[0]
    return found.squeeze(0).float()


_LENGTHS = (41, 23)
"""Tokens of the requests that are compared."""
_LONGEST = 300
"""Tokens of the first at most: long enough to leave a small window or chunk."""
_MARGIN = 9
"""Tokens beyond the window or chunk."""


def probe_prompts(config: TransformersConfig) -> list[torch.Tensor]:
    """Return two requests' tokens, int64, by which a loaded model is compared with transformers' own attention."""
    windows = config.windows if isinstance(config, EncoderConfig) else ()
    reaches = [
        *(2 * window for window in windows if window is not None),
        *(
            reach
            for layer in config.attention_layers
            for reach in (layer.sliding_window, layer.chunk_size)
            if reach
        ),
    ]
    wanted = max([_LENGTHS[0], *(reach + _MARGIN for reach in reaches if reach + _MARGIN <= _LONGEST)])
    lengths = (min(each, config.max_position_embeddings) for each in (wanted, _LENGTHS[1]))
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lengths]


class TransformersEncoder(_Headed):
    """An encoder, with its head if it classifies.

    Args:
        config: with the attention that `follow` has found.
        model: in evaluation mode, on its device.
    """

    layers: ClassVar[Sequence[CompilableLayer]] = ()
    attention_layers: ClassVar[Sequence[Attention]] = ()

    def __init__(self, config: EncoderConfig, model: PreTrainedModel) -> None:
        self._config = config
        self._has_head = config.pooling is not None and config.pooling.task == "classify"
        body: Any = getattr(model, model.base_model_prefix) if self._has_head else model
        super().__init__(model, body)
        modules = dict(body.named_modules())
        self._calls = [
            _Call(modules[name], params.scale, window)
            for (name, *_), params, window in zip(config.calls, config.attention, config.windows, strict=True)
        ]
        self._linears = CalledLinears(body, body.dtype)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size], after the final norm. Every prompt must be whole."""
        starts = inputs.meta.query_start_loc_cpu.tolist()
        bounds = list(itertools.pairwise(starts))
        positions = self._positions(inputs, bounds)
        types = inputs.token_types
        if self._config.runs_alone:
            parts = [
                self._states(
                    inputs.token_ids[start:end],
                    positions[start:end],
                    None if types is None else types[start:end],
                )
                for start, end in bounds
                if end > start
            ]
            return torch.cat(parts)
        with attending(_WholePrompts(self._calls, bounds)):
            return self._states(inputs.token_ids, positions, types)

    def _states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None
    ) -> torch.Tensor:
        given: dict[str, torch.Tensor] = {}
        if _takes(self._body, "position_ids"):
            given["position_ids"] = positions.unsqueeze(0)
        if self._config.has_token_types:
            types = torch.zeros_like(token_ids) if types is None else types
            given["token_type_ids"] = types.unsqueeze(0)
        output = self._body(input_ids=token_ids.unsqueeze(0), **given)
        self._output = type(output)
        states: torch.Tensor = output[0]
        return states.squeeze(0)

    def _positions(self, inputs: ModelInputs, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
        first, padding = self._config.first_position, self._config.padding_id
        if not first:
            return inputs.positions
        counted = inputs.token_ids != padding
        positions = inputs.positions + first
        if not bool(counted.all()):
            for start, end in bounds:
                own = counted[start:end]
                positions[start:end] = own.cumsum(0) * own + padding
        return positions

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an encoder has no output head")

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, num_labels] of vectors [R, hidden_size], both float32, before any activation: the
        model's own head over prompts that have one state each."""
        assert self._has_head, "embeddings have no scores"
        return self._head(vectors.unsqueeze(1)).float()

    def reference(self, token_ids: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the states [T, hidden_size] of one prompt, and its scores [num_labels] (without a head none), as
        transformers does, in float32."""
        set_attention(self.model, "eager")
        given = {"token_type_ids": types.unsqueeze(0)} if self._config.has_token_types else {}
        kept: list[torch.Tensor] = []
        hook = self._body.register_forward_hook(lambda _, __, output: kept.append(output[0]))
        try:
            output = self.model(input_ids=token_ids.unsqueeze(0), **given)
        finally:
            hook.remove()
            set_attention(self.model, "eager" if self._config.runs_alone else STEP)
        scores = output.logits[0].float() if self._has_head else token_ids.new_zeros(0).float()
        return kept[0].squeeze(0).float(), scores

    def use_kernels(self) -> None:
        """Let our kernels compute the linear layers that have been called, on a CPU, and put the head in float32, as
        those of decoders are. Steps leave it out from then on."""
        if self._has_head:
            for child in self.model.children():
                if child is not self._body:
                    child.float()
            if (pooler := getattr(self._body, "pooler", None)) is not None:
                self._pooler, self._body.pooler = pooler.float(), None
        self._linears.use_kernels()


class _Call(NamedTuple):
    """One call of the attention function in every forward pass."""

    module: nn.Module
    scale: float
    window: int | None
    """Tokens before and after itself that a token attends to; None: all."""


class _WholePrompts:
    """Computes attention of one forward pass, prompt by prompt.

    Args:
        bounds: first and end of each prompt's tokens.
    """

    def __init__(self, calls: Sequence[_Call], bounds: Sequence[tuple[int, int]]) -> None:
        self._calls = iter(calls)
        self._bounds = bounds
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        own = next(self._calls, None)
        assert own is not None, "a model attends as often as when it was followed"
        assert own.module is call.module, "a model attends in the order in which it was followed"
        q, k, v = call.heads
        attended = q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1])
        for start, end in self._bounds:
            part = F.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, start:end],
                v[:, :, start:end],
                attn_mask=self._mask(end - start, own.window, q.device),
                scale=own.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            attended[:, start:end] = part.transpose(1, 2)
        return attended

    def _mask(self, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return which tokens each attends to, bool [length, length]; None: all."""
        if window is None or length <= window + 1:
            return None
        found = self._masks.get((length, window))
        if found is None:
            places = torch.arange(length, device=device)
            found = (places[:, None] - places).abs() <= window
            self._masks[length, window] = found
        return found


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(module).forward).parameters

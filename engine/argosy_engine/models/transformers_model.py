"""TransformersModel: a decoder of transformers' modelling code, over our KV cache and attention backends.

The attention function (`transformers_attention`) gives q, k and v, which the model has rotated, to an `Attention` layer
with the cache of that layer; the requests of a step are one row of tokens. What attention a model computes was found
before (`transformers_follow`).

Nothing that comes with a checkpoint is executed. Design: vLLM's `model_executor/models/transformers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights
from argosy_engine.attention.layer import Attention, StateLayer
from argosy_engine.attention.metadata import ModelInputs
from argosy_engine.errors import ConfigError
from argosy_engine.layers.layer_compiler import CompilableLayer
from argosy_engine.model_configs.encoder_config import EncoderConfig
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.transformers_attention import (
    STEP,
    AttendingLayer,
    Step,
    attending,
    running,
    set_attention,
)
from argosy_engine.models.transformers_classes import body_of
from argosy_engine.models.transformers_kernels import CalledLinears
from argosy_engine.models.transformers_states import (
    StateCall,
    StepStates,
    cache_argument,
    use_state_kernels,
)


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


class TransformersModel:
    """One of transformers' causal models, loaded.

    Args:
        config: with the attention that `follow` has found.
        model: in evaluation mode, on its device.
        label_head: float32 [num_labels, hidden_size], of a model that classifies.
        expected: `reference_outputs` of `probe_prompts` by the whole model, if this is a rank's part of it.
        tensor_parallel_size: number of ranks.
    """

    checkpoint_prefix: ClassVar[str] = ""
    ignored_tensors: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        config: TransformersConfig,
        model: PreTrainedModel,
        backend: AttentionBackend,
        label_head: torch.Tensor | None = None,
        expected: Sequence[torch.Tensor] | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.model = model
        self._has_head = config.pooling is None
        self._label_head = label_head
        self._config = config
        self.expected = expected
        self._numbers_tokens = config.numbers_tokens
        self._body = body_of(model, has_head=self._has_head)
        self._given: torch.Tensor | None = None
        """Hidden states that the output head takes instead of the body's."""
        self._output: type[Any] | None = None
        self._run_body = self._body.forward
        self._body.forward = self._forward_body
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

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size], after the final norm."""
        step = Step(self._attending, inputs.meta, StepStates(inputs.meta) if self.state_layers else None)
        own = _OwnPositions(inputs.positions, step) if self._numbers_tokens else contextlib.nullcontext()
        with attending(step), own:
            output = self._body(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                **cache_argument(self._body, step.states),
            )
        self._output = type(output)
        hidden: torch.Tensor = output[0]
        return hidden.squeeze(0)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the model's own output head, with all that it does to logits."""
        assert self._has_head, "a pooling model has no output head"
        self._given = hidden.unsqueeze(0)
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits.squeeze(0)

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

    def _forward_body(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._run_body(*args, **kwargs)
        assert self._output is not None
        return self._output(last_hidden_state=self._given)


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

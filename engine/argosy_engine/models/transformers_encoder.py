"""TransformersEncoder: an encoder of transformers' modelling code (BERT and its like), for embeddings and labels.

A step has whole prompts, one behind the other in a row of tokens; the attention function lets each token attend to its
own prompt only. There is no KV cache. An encoder whose attention does not go through transformers' interface computes
one prompt after the other.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import ModelInputs
from argosy_engine.layers.layer_compiler import CompilableLayer
from argosy_engine.model_configs.encoder_config import EncoderConfig
from argosy_engine.models.transformers_attention import STEP, AttentionCall, attending, set_attention
from argosy_engine.models.transformers_kernels import CalledLinears


class TransformersEncoder:
    """An encoder, with its head if it classifies.

    Args:
        config: with the attention that `follow` has found.
        model: in evaluation mode, on its device.
    """

    checkpoint_prefix: ClassVar[str] = ""
    ignored_tensors: ClassVar[Sequence[str]] = ()
    layers: ClassVar[Sequence[CompilableLayer]] = ()
    attention_layers: ClassVar[Sequence[Attention]] = ()

    def __init__(self, config: EncoderConfig, model: PreTrainedModel) -> None:
        self.model = model
        self._config = config
        self._has_head = config.pooling is not None and config.pooling.task == "classify"
        body: Any = getattr(model, model.base_model_prefix) if self._has_head else model
        self._body = body
        modules = dict(body.named_modules())
        self._calls = [
            _Call(modules[name], params.scale, window)
            for (name, *_), params, window in zip(config.calls, config.attention, config.windows, strict=True)
        ]
        self._given: torch.Tensor | None = None
        """States that the head takes instead of the body's."""
        self._output: type[Any] | None = None
        self._run_body = body.forward
        body.forward = self._forward_body
        self._linears = CalledLinears(body, body.dtype)
        self._pooler: nn.Module | None = None
        """The part of the head that transformers has in the body (BERT)."""

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

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an encoder has no output head")

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, num_labels] of vectors [R, hidden_size], both float32, before any activation: the
        model's own head over prompts that have one state each."""
        assert self._has_head, "embeddings have no scores"
        self._given = vectors.unsqueeze(1)
        try:
            ids = torch.zeros(len(vectors), 1, dtype=torch.int64, device=vectors.device)
            scores: torch.Tensor = self.model(input_ids=ids).logits
        finally:
            self._given = None
        return scores.float()

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

    def _forward_body(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._run_body(*args, **kwargs)
        assert self._output is not None
        more = {} if self._pooler is None else {"pooler_output": self._pooler(self._given)}
        return self._output(last_hidden_state=self._given, **more)


class _Call:
    """One call of the attention function in every forward pass."""

    def __init__(self, module: nn.Module, scale: float, window: int | None) -> None:
        self.module = module
        self.scale = scale
        self.window = window
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

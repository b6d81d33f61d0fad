"""OPT: learned positions that start at index 2, LayerNorm before each block (after it in OPT-350m), ReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.opt_config import OPTConfig
from argosy_engine.models.gpt2_layers import ACTIVATIONS, LayerNorm, MultiHeadAttention

_POSITION_OFFSET = 2
"""Rows at the start of the position table that training reserved for padding."""
_EPS = 1e-5


class OPTLayer:
    def __init__(self, config: OPTConfig, factory: LayerFactory, index: int, params: AttentionParams) -> None:
        prefix = f"model.decoder.layers.{index}."
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.has_bias
        attention = prefix + "self_attn."
        self.norm_before = config.norm_before
        self.attention_norm = LayerNorm(factory, prefix + "self_attn_layer_norm", hidden, _EPS)
        output = factory.row_linear(attention + "out_proj", hidden, hidden, bias=bias)
        self.attend = MultiHeadAttention(
            factory.qkv_linear([attention + f"{name}_proj" for name in "qkv"], params, hidden, bias=bias),
            output,
            factory.attention(params, prefix=attention, feeds=output),
        )
        self.mlp_norm = LayerNorm(factory, prefix + "final_layer_norm", hidden, _EPS)
        self.up = factory.column_linear({prefix + "fc1": inner}, hidden, bias=bias)
        self.down = factory.row_linear(prefix + "fc2", inner, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.activation]
        self._project = factory.part(OPTLayer.project)
        self._feed_forward = factory.part(OPTLayer.feed_forward)
        self._widths = hidden, hidden

    def __call__(
        self, x: torch.Tensor | None, hidden: torch.Tensor, meta: AttentionMetadata
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run the layer; return what the next one gets as x and hidden. All tensors are [T, hidden_size].

        Args:
            x: the last layer's output, which has to be added to hidden. None: it was, or this is the first layer.
            hidden: may be updated in place.
        """
        if not self.norm_before:
            hidden = self.attention_norm(hidden + self.attend(hidden, meta))
            return None, self.mlp_norm(hidden + self.down(self.activation(self.up(hidden))))
        qkv = self.attend.qkv(self.attention_norm(hidden)) if x is None else self._project(self, x, hidden)
        attended = self.attend.of_projected(qkv, meta)
        return self.down.sum_ranks(self._feed_forward(self, attended, hidden)), hidden

    def project(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add x to hidden and return q, k and v of the norm of the sum."""
        return self.attend.qkv(self.attention_norm(hidden.add_(x)))

    def feed_forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add x to hidden and return the MLP's partial output of the norm of the sum."""
        return self.down.partial(self.activation(self.up(self.mlp_norm(hidden.add_(x)))))

    def parts_to_compile(self) -> list[CompilablePart]:
        if not self.norm_before:
            return []
        return [
            CompilablePart(self._project, self._widths),
            CompilablePart(self._feed_forward, self._widths),
        ]


class OPT:
    checkpoint_prefix = "model."
    ignored_tensors = ()

    def __init__(self, config: OPTConfig, factory: LayerFactory) -> None:
        base = "model.decoder."
        hidden, width = config.hidden_size, config.embedding_size
        before, after = factory.before_layers(is_tied=config.tie_word_embeddings), factory.after_layers()
        self.embedding = before.embedding(base + "embed_tokens.weight", config.vocab_size, width)
        self.positions = before.take(
            base + "embed_positions.weight", config.max_position_embeddings + _POSITION_OFFSET, hidden
        )
        self.project_in = self.project_out = None
        if width != hidden:
            self.project_in = before.linear({base + "project_in": hidden}, width)
            self.project_out = after.linear({base + "project_out": width}, hidden)
        self.layers = [
            OPTLayer(config, factory, index, params)
            for index, params in factory.own_layers(config.attention_layers, AttentionParams)
        ]
        self.norm = None
        if config.has_final_norm:
            self.norm = LayerNorm(after, base + "final_layer_norm", hidden, _EPS)
        self.lm_head = after.output_head(
            self.embedding, config.vocab_size, is_tied=config.tie_word_embeddings
        )

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attend.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        hidden = inputs.hidden
        if hidden is None:
            hidden = self.embedding(inputs.token_ids)
            if self.project_in is not None:
                hidden = self.project_in(hidden)
            hidden = hidden + F.embedding(inputs.positions + _POSITION_OFFSET, self.positions)
        x: torch.Tensor | None = None
        for layer in self.layers:
            x, hidden = layer(x, hidden, inputs.meta)
        return hidden if x is None else hidden.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(self.last_hidden_state(hidden))

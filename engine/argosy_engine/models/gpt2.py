"""GPT-2: learned positions, LayerNorm before each block, biases everywhere.

Its checkpoints store projections as Conv1D weights [in, out], the transpose of a linear layer's weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention.layer import Attention
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import Linear
from argosy_engine.model_configs.gpt2_config import GPT2Config
from argosy_engine.models.gpt2_layers import ACTIVATIONS, LayerNorm, MultiHeadAttention


class GPT2Layer:
    def __init__(
        self, config: GPT2Config, factory: LayerFactory, index: int, params: AttentionParams
    ) -> None:
        prefix = f"transformer.h.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size

        def conv1d_row(name: str, in_features: int) -> Linear:
            return factory.row_linear(prefix + name, in_features, hidden, bias=True, is_transposed=True)

        self.norm_1 = LayerNorm(factory, prefix + "ln_1", hidden, config.layer_norm_eps)
        output = conv1d_row("attn.c_proj", hidden)
        self.attend = MultiHeadAttention(
            factory.qkv_linear([prefix + "attn.c_attn"], params, hidden, bias=True, is_transposed=True),
            output,
            factory.attention(params, prefix=prefix + "attn.", feeds=output),
        )
        self.norm_2 = LayerNorm(factory, prefix + "ln_2", hidden, config.layer_norm_eps)
        self.up = factory.column_linear({prefix + "mlp.c_fc": inner}, hidden, bias=True, is_transposed=True)
        self.down = conv1d_row("mlp.c_proj", inner)
        self.activation = ACTIVATIONS[config.activation]
        self._project = factory.part(GPT2Layer.project)
        self._feed_forward = factory.part(GPT2Layer.feed_forward)
        self._widths = hidden, hidden

    def __call__(self, x: torch.Tensor | None, hidden: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Run the layer; return what the next one gets as x. All tensors are [T, hidden_size].

        Args:
            x: the last layer's output, which has to be added to hidden. None in the first layer.
            hidden: updated in place.
        """
        qkv = self.attend.qkv(self.norm_1(hidden)) if x is None else self._project(self, x, hidden)
        attended = self.attend.of_projected(qkv, meta)
        return self.down.sum_ranks(self._feed_forward(self, attended, hidden))

    def project(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add x to hidden and return q, k and v of the norm of the sum."""
        return self.attend.qkv(self.norm_1(hidden.add_(x)))

    def feed_forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add x to hidden and return the MLP's partial output of the norm of the sum."""
        return self.down.partial(self.activation(self.up(self.norm_2(hidden.add_(x)))))

    def parts_to_compile(self) -> list[CompilablePart]:
        return [
            CompilablePart(self._project, self._widths),
            CompilablePart(self._feed_forward, self._widths),
        ]


class GPT2:
    checkpoint_prefix = "transformer."
    ignored_tensors = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, config: GPT2Config, factory: LayerFactory) -> None:
        hidden = config.hidden_size
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        self.embedding = before.embedding("transformer.wte.weight", config.vocab_size, hidden)
        self.positions = before.take("transformer.wpe.weight", config.max_position_embeddings, hidden)
        self.layers = [
            GPT2Layer(config, factory, index, params)
            for index, params in factory.own_layers(config.attention_layers, AttentionParams)
        ]
        after = factory.after_layers()
        self.norm = LayerNorm(after, "transformer.ln_f", hidden, config.layer_norm_eps)
        self.lm_head = after.output_head(
            self.embedding, config.vocab_size, is_tied=config.tie_word_embeddings
        )

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attend.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        hidden = inputs.hidden
        if hidden is None:
            hidden = self.embedding(inputs.token_ids) + F.embedding(inputs.positions, self.positions)
        x: torch.Tensor | None = None
        for layer in self.layers:
            x = layer(x, hidden, inputs.meta)
        return hidden if x is None else hidden.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(self.norm(hidden))

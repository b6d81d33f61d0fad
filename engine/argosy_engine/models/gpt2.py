"""GPT-2 and OPT: learned positions, LayerNorm before each block (after it in OPT-350m), no gates.

GPT-2's checkpoints store projections as Conv1D weights [in, out], the transpose of a linear layer's weight. OPT's
positions start at index 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import Attention, AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import Linear
from argosy_engine.layers.norms import ACTIVATIONS, LayerNorm
from argosy_engine.model_configs.gpt2_config import GPT2Config, OPTConfig
from argosy_engine.models.decoder import Decoder, Norm


class MultiHeadAttention:
    """Multi-head attention for models whose input carries the positions: q and k are not rotated.

    Args:
        qkv: projection of [T, hidden_size] to concatenated q, k and v.
    """

    def __init__(self, qkv: Linear, output: Linear, attention: Attention) -> None:
        self.qkv = qkv
        self.output = output
        self.attention = attention

    def __call__(self, x: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Attend from x [T, hidden_size]; the output has the same shape."""
        return self.of_projected(self.qkv(x), meta)

    def of_projected(self, qkv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """The same from the projections to q, k and v."""
        return self.output(self.attention(qkv, meta))


class GPT2Layer:
    def __init__(
        self, config: GPT2Config, factory: LayerFactory, index: int, params: AttentionParams
    ) -> None:
        prefix = f"transformer.h.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size

        def conv1d_row(name: str, in_features: int) -> Linear:
            return factory.row_linear(prefix + name, in_features, hidden, bias=True, is_transposed=True)

        self.norm_1 = factory.layer_norm(prefix + "ln_1", hidden, config.layer_norm_eps)
        output = conv1d_row("attn.c_proj", hidden)
        self.attend = MultiHeadAttention(
            factory.qkv_linear([prefix + "attn.c_attn"], params, hidden, bias=True, is_transposed=True),
            output,
            factory.attention(params, prefix=prefix + "attn.", feeds=output),
        )
        self.norm_2 = factory.layer_norm(prefix + "ln_2", hidden, config.layer_norm_eps)
        self.up = factory.column_linear({prefix + "mlp.c_fc": inner}, hidden, bias=True, is_transposed=True)
        self.down = conv1d_row("mlp.c_proj", inner)
        self.activation = ACTIVATIONS[config.activation]
        self._project = factory.part(GPT2Layer.project)
        self._feed_forward = factory.part(GPT2Layer.feed_forward)
        self._widths = hidden, hidden

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`."""
        if residual is None:
            residual, qkv = x, self.attend.qkv(self.norm_1(x))
        else:
            qkv = self._project(self, x, residual)
        attended = self.attend.of_projected(qkv, meta)
        return self.down.sum_ranks(self._feed_forward(self, attended, residual)), residual

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


class GPT2(Decoder[GPT2Layer]):
    """See `Decoder`."""

    checkpoint_prefix = "transformer."
    ignored_tensors = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, config: GPT2Config, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(config, factory, config.layer_norm_eps, embedding="transformer.wte")
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        self.positions = before.take(
            "transformer.wpe.weight", config.max_position_embeddings, config.hidden_size
        )

    def make_layers(self, factory: LayerFactory) -> list[GPT2Layer]:
        layers = factory.own_layers(self.config.attention_layers, AttentionParams)
        return [GPT2Layer(self.config, factory, index, params) for index, params in layers]

    def make_norm(self, factory: LayerFactory) -> LayerNorm:
        return factory.layer_norm("transformer.ln_f", self.config.hidden_size, self.config.layer_norm_eps)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attend.attention for layer in self.layers]

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        if inputs.hidden is not None:
            return inputs.hidden
        return self.embedding(inputs.token_ids) + F.embedding(inputs.positions, self.positions)


_POSITION_OFFSET = 2
"""Rows at the start of the position table that training reserved for padding."""
_EPS = 1e-5


class OPTLayer:
    def __init__(self, config: OPTConfig, factory: LayerFactory, index: int, params: AttentionParams) -> None:
        prefix = f"model.decoder.layers.{index}."
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.has_bias
        attention = prefix + "self_attn."
        self.norm_before = config.norm_before
        self.attention_norm = factory.layer_norm(prefix + "self_attn_layer_norm", hidden, _EPS)
        output = factory.row_linear(attention + "out_proj", hidden, hidden, bias=bias)
        self.attend = MultiHeadAttention(
            factory.qkv_linear([attention + f"{name}_proj" for name in "qkv"], params, hidden, bias=bias),
            output,
            factory.attention(params, prefix=attention, feeds=output),
        )
        self.mlp_norm = factory.layer_norm(prefix + "final_layer_norm", hidden, _EPS)
        self.up = factory.column_linear({prefix + "fc1": inner}, hidden, bias=bias)
        self.down = factory.row_linear(prefix + "fc2", inner, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.activation]
        self._project = factory.part(OPTLayer.project)
        self._feed_forward = factory.part(OPTLayer.feed_forward)
        self._widths = hidden, hidden

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `decoder.Layer`."""
        if not self.norm_before:
            x = self.attention_norm(x + self.attend(x, meta))
            return self.mlp_norm(x + self.down(self.activation(self.up(x)))), None
        if residual is None:
            residual, qkv = x, self.attend.qkv(self.attention_norm(x))
        else:
            qkv = self._project(self, x, residual)
        attended = self.attend.of_projected(qkv, meta)
        return self.down.sum_ranks(self._feed_forward(self, attended, residual)), residual

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


class OPT(Decoder[OPTLayer]):
    """See `Decoder`."""

    ignored_tensors = ()

    def __init__(self, config: OPTConfig, factory: LayerFactory) -> None:
        self.config = config
        base, hidden, width = "model.decoder.", config.hidden_size, config.embedding_size
        super().__init__(config, factory, _EPS, embedding=base + "embed_tokens", embedding_width=width)
        before, after = factory.before_layers(is_tied=config.tie_word_embeddings), factory.after_layers()
        self.positions = before.take(
            base + "embed_positions.weight", config.max_position_embeddings + _POSITION_OFFSET, hidden
        )
        self.project_in = self.project_out = None
        if width != hidden:
            self.project_in = before.linear({base + "project_in": hidden}, width)
            self.project_out = after.linear({base + "project_out": width}, hidden)

    def make_layers(self, factory: LayerFactory) -> list[OPTLayer]:
        layers = factory.own_layers(self.config.attention_layers, AttentionParams)
        return [OPTLayer(self.config, factory, index, params) for index, params in layers]

    def make_norm(self, factory: LayerFactory) -> Norm:
        if not self.config.has_final_norm:
            return lambda x: x
        return factory.layer_norm("model.decoder.final_layer_norm", self.config.hidden_size, _EPS)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attend.attention for layer in self.layers]

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        if inputs.hidden is not None:
            return inputs.hidden
        embedded = self.embedding(inputs.token_ids)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        return embedded + F.embedding(inputs.positions + _POSITION_OFFSET, self.positions)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(self.last_hidden_state(hidden))

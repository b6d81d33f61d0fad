"""Decoders with LayerNorms and MLPs without a gate: GPT-2, OPT and XGLM, whose input carries the positions; BLOOM and
MPT, whose scores carry them (ALiBi, arXiv 2108.12409); Falcon, with rotary positions.

GPT-2's checkpoints store projections as Conv1D weights [in, out], the transpose of a linear layer's weight. Positions
of OPT and XGLM start at index 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import Attention, AttentionMetadata, AttentionWeights, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.norms import ACTIVATIONS, LayerNorm
from argosy_engine.model_configs.gpt2_config import (
    FalconConfig,
    GPT2Config,
    OPTConfig,
    PlainConfig,
    XGLMConfig,
)
from argosy_engine.models.decoder import Decoder, Norm


class LayerNames(NamedTuple):
    """Names of a layer's tensors."""

    prefix: str
    """Of all of them, up to the layer's number."""
    attention: str
    """Prefix of those of attention, after the number."""
    qkv: tuple[str, ...]
    """Of the projections to q, k and v, or of the one to all."""
    output: str
    norms: tuple[str, str]
    """Of what attention and the MLP get."""
    up: str
    down: str


class PlainLayer:
    """Attention and an MLP without a gate, each after a LayerNorm or before it (OPT-350m), or side by side (Falcon).

    Args:
        is_transposed: whether projections are stored so.
        weights: of attention.
    """

    def __init__(
        self,
        config: PlainConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        names: LayerNames,
        *,
        is_transposed: bool = False,
        weights: AttentionWeights = AttentionWeights(),  # noqa: B008 (immutable)
    ) -> None:
        prefix = f"{names.prefix}{index}."
        attention, bias = prefix + names.attention, config.has_bias
        hidden, inner = config.hidden_size, config.intermediate_size
        self.norm_before, self.is_parallel, self.limit = (
            config.norm_before,
            config.is_parallel,
            config.qkv_limit,
        )
        first, second = names.norms
        self.norm_1 = layer_norm(config, factory, prefix + first)
        self.output = factory.row_linear(
            attention + names.output, hidden, hidden, bias=bias, is_transposed=is_transposed
        )
        self.qkv = factory.qkv_linear(
            [attention + name for name in names.qkv], params, hidden,
            bias=bias, is_transposed=is_transposed, is_grouped=config.is_grouped,
        )  # fmt: skip
        self.attention = factory.attention(params, weights, prefix=attention, feeds=self.output)
        self.norm_2 = self.norm_1 if first == second else layer_norm(config, factory, prefix + second)
        self.up = factory.column_linear(
            {prefix + names.up: inner}, hidden, bias=bias, is_transposed=is_transposed
        )
        self.down = factory.row_linear(
            prefix + names.down, inner, hidden, bias=bias, is_transposed=is_transposed
        )
        self.activation = ACTIVATIONS[config.activation]
        self._project = factory.part(PlainLayer.project)
        self._feed_forward = factory.part(PlainLayer.feed_forward)
        self._widths = hidden, hidden

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `decoder.Layer`."""
        if not self.norm_before:
            x = self.norm_1(x + self.output(self.attention(self.projected(x), meta)))
            return self.norm_2(x + self.down(self.fed(x))), None
        if self.is_parallel:
            residual = x if residual is None else residual.add_(x)
            normed = self.norm_1(residual)
            attended = self.output.partial(self.attention(self.projected(normed), meta))
            if self.norm_2 is not self.norm_1:
                normed = self.norm_2(residual)
            # Ranks add what attention and MLP make of the same hidden states in one sum.
            return self.down.sum_ranks(attended.add_(self.down.partial(self.fed(normed)))), residual
        if residual is None:
            residual, qkv = x, self.projected(self.norm_1(x))
        else:
            qkv = self._project(self, x, residual)
        attended = self.output(self.attention(qkv, meta))
        return self.down.sum_ranks(self._feed_forward(self, attended, residual)), residual

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        """Return q, k and v of x [T, hidden_size], side by side."""
        qkv = self.qkv(x)
        return qkv if self.limit is None else qkv.clamp(-self.limit, self.limit)

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the MLP's second projection gets for x [T, hidden_size]."""
        return self.activation(self.up(x))

    def project(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add x to hidden and return q, k and v of the norm of the sum."""
        return self.projected(self.norm_1(hidden.add_(x)))

    def feed_forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Add x to hidden and return the MLP's partial output of the norm of the sum."""
        return self.down.partial(self.fed(self.norm_2(hidden.add_(x))))

    def parts_to_compile(self) -> list[CompilablePart]:
        if not self.norm_before or self.is_parallel:
            return []
        return [
            CompilablePart(self._project, self._widths),
            CompilablePart(self._feed_forward, self._widths),
        ]


def layer_norm(config: PlainConfig, factory: LayerFactory, name: str) -> LayerNorm:
    """Make a LayerNorm over the hidden states."""
    return factory.layer_norm(name, config.hidden_size, config.layer_norm_eps, has_bias=config.has_norm_bias)


class PlainDecoder(Decoder[PlainLayer]):
    """See `Decoder`."""

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]


class GPT2(PlainDecoder):
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

    def make_layers(self, factory: LayerFactory) -> list[PlainLayer]:
        names = LayerNames(
            "transformer.h.", "attn.", ("c_attn",), "c_proj", ("ln_1", "ln_2"), "mlp.c_fc", "mlp.c_proj"
        )
        layers = factory.own_layers(self.config.attention_layers, AttentionParams)
        return [
            PlainLayer(self.config, factory, index, params, names, is_transposed=True)
            for index, params in layers
        ]

    def make_norm(self, factory: LayerFactory) -> LayerNorm:
        return layer_norm(self.config, factory, "transformer.ln_f")

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        if inputs.hidden is not None:
            return inputs.hidden
        return self.embedding(inputs.token_ids) + F.embedding(inputs.positions, self.positions)


_POSITION_OFFSET = 2
"""Rows at the start of the position table that training reserved for padding."""
_FAIRSEQ = (
    "self_attn.", ("q_proj", "k_proj", "v_proj"), "out_proj",
    ("self_attn_layer_norm", "final_layer_norm"), "fc1", "fc2",
)  # fmt: skip


class OPT(PlainDecoder):
    """See `Decoder`."""

    ignored_tensors = ()

    def __init__(self, config: OPTConfig, factory: LayerFactory) -> None:
        self.config = config
        base, hidden, width = "model.decoder.", config.hidden_size, config.embedding_size
        super().__init__(
            config, factory, config.layer_norm_eps, embedding=base + "embed_tokens", embedding_width=width
        )
        before, after = factory.before_layers(is_tied=config.tie_word_embeddings), factory.after_layers()
        self.positions = before.take(
            base + "embed_positions.weight", config.max_position_embeddings + _POSITION_OFFSET, hidden
        )
        self.project_in = self.project_out = None
        if width != hidden:
            self.project_in = before.linear({base + "project_in": hidden}, width)
            self.project_out = after.linear({base + "project_out": width}, hidden)

    def make_layers(self, factory: LayerFactory) -> list[PlainLayer]:
        names = LayerNames("model.decoder.layers.", *_FAIRSEQ)
        layers = factory.own_layers(self.config.attention_layers, AttentionParams)
        return [PlainLayer(self.config, factory, index, params, names) for index, params in layers]

    def make_norm(self, factory: LayerFactory) -> Norm:
        if not self.config.has_final_norm:
            return lambda x: x
        return layer_norm(self.config, factory, "model.decoder.final_layer_norm")

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


class XGLM(PlainDecoder):
    """See `Decoder`."""

    ignored_tensors = (r"model\.embed_positions\.weights",)

    def __init__(self, config: XGLMConfig, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(
            config, factory, config.layer_norm_eps, embedding_multiplier=config.embedding_multiplier
        )
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        if before.device.type != "meta":
            positions = sinusoids(factory.max_positions + _POSITION_OFFSET, config.hidden_size)
            if config.zero_position in range(len(positions)):
                positions[config.zero_position] = 0.0
            self.positions = positions.to(before.device, before.dtype)

    def make_layers(self, factory: LayerFactory) -> list[PlainLayer]:
        names = LayerNames("model.layers.", *_FAIRSEQ)
        layers = factory.own_layers(self.config.attention_layers, AttentionParams)
        return [PlainLayer(self.config, factory, index, params, names) for index, params in layers]

    def make_norm(self, factory: LayerFactory) -> LayerNorm:
        return layer_norm(self.config, factory, "model.layer_norm")

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        if inputs.hidden is not None:
            return inputs.hidden
        return super().embed(inputs) + F.embedding(inputs.positions + _POSITION_OFFSET, self.positions)


def sinusoids(num_positions: int, width: int) -> torch.Tensor:
    """Return the positions of tensor2tensor, float32 [num_positions, width]: sines, then cosines, of frequencies from 1
    to 1 / 10000; an odd width ends with zeros."""
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(num_positions).float().unsqueeze(1) * rates
    return F.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, width % 2))


class Falcon(PlainDecoder):
    """Falcon (arXiv 2311.16867), BLOOM (arXiv 2211.05100) and MPT. See `Decoder`."""

    checkpoint_prefix = "transformer."
    ignored_tensors = ()

    def __init__(self, config: FalconConfig, factory: LayerFactory) -> None:
        self.config = config
        embedding = "transformer.wte" if config.is_mpt else "transformer.word_embeddings"
        super().__init__(config, factory, config.layer_norm_eps, embedding=embedding)
        self.embedding_norm = None
        if config.has_embedding_norm:
            before = factory.before_layers(is_tied=config.tie_word_embeddings)
            self.embedding_norm = layer_norm(config, before, "transformer.word_embeddings_layernorm")

    def make_layers(self, factory: LayerFactory) -> list[PlainLayer]:
        config = self.config
        if config.is_mpt:
            names = LayerNames(
                "transformer.blocks.", "attn.", ("Wqkv",), "out_proj", ("norm_1", "norm_2"), "ffn.up_proj",
                "ffn.down_proj",
            )  # fmt: skip
        else:
            norms = {
                "sequential": ("input_layernorm", "post_attention_layernorm"),
                "one": ("input_layernorm", "input_layernorm"),
                "two": ("ln_attn", "ln_mlp"),
            }[config.norms]
            names = LayerNames(
                "transformer.h.", "self_attention.", ("query_key_value",), "dense", norms, "mlp.dense_h_to_4h",
                "mlp.dense_4h_to_h",
            )  # fmt: skip
        rotary = None if config.rope is None else factory.rotary(config.rope, config.head_dim)
        layers = factory.own_layers(config.attention_layers, AttentionParams)
        slopes = config.alibi_slopes
        weights = AttentionWeights(rotary, alibi_slopes=factory.of_heads(slopes) if slopes else None)
        return [
            PlainLayer(config, factory, index, params, names, weights=weights) for index, params in layers
        ]

    def make_norm(self, factory: LayerFactory) -> LayerNorm:
        return layer_norm(
            self.config, factory, "transformer.norm_f" if self.config.is_mpt else "transformer.ln_f"
        )

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        embedded = super().embed(inputs)
        if inputs.hidden is not None or self.embedding_norm is None:
            return embedded
        return self.embedding_norm(embedded)

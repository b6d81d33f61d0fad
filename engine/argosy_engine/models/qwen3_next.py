"""Qwen3-Next and Qwen3.5: Gated DeltaNets (arXiv 2412.06464) in most layers, gated attention in the others.

A Gated DeltaNet keeps a state per request instead of keys and values. Attention is Qwen3's with two differences: only
the leading elements of a head are rotated, and a gate of each element of the heads' outputs is projected beside the
queries. All norms but those within the Gated DeltaNets multiply by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from argosy_engine.attention.backend import AttentionWeights
from argosy_engine.attention.layer import Attention, StateLayer
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.qwen3_next_config import Qwen3NextConfig
from argosy_engine.models.llama import MLP, make_mlp
from argosy_engine.quantized_rows import Activations, RowQuantization


class PlainRows:
    """Stands for something that reads activations as they are."""

    input_quantization: RowQuantization | None = None


_PLAIN = PlainRows()


class GatedAttention:
    """Attention with normed and partly rotated q and k, whose output is multiplied by sigmoid(gate)."""

    input_quantization: RowQuantization | None

    def __init__(
        self,
        config: Qwen3NextConfig,
        factory: LayerFactory,
        prefix: str,
        params: AttentionParams,
        rotary: RotaryEmbedding,
    ) -> None:
        hidden, head_dim, eps = config.hidden_size, params.head_dim, config.rms_norm_eps
        order = runs(config.rope.head_order(head_dim) or range(head_dim))
        q, k, v = factory.sharding.qkv(params)
        # Of each head the checkpoint has the query's rows, then the gate's.
        heads = range(q.start // head_dim, q.stop // head_dim)
        gates = [range((2 * head + 1) * head_dim, (2 * head + 2) * head_dim) for head in heads]
        queries = chain.from_iterable(_moved(order, 2 * head * head_dim) for head in heads)
        keys = chain.from_iterable(_moved(order, start) for start in range(k.start, k.stop, head_dim))
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        kv_width = params.num_kv_heads * head_dim
        self.projection = factory.selected_linear(
            dict(zip(names, (2 * params.num_heads * head_dim, kv_width, kv_width), strict=True)),
            dict(zip(names, ([*gates, *queries], list(keys), [v]), strict=True)),
            hidden,
            bias=config.attention_bias,
        )
        self.input_quantization = self.projection.input_quantization
        self._num_gates = len(q)
        self.output = factory.row_linear(
            prefix + "o_proj", params.num_heads * head_dim, hidden, bias=config.output_bias
        )
        q_norm, k_norm = (
            factory.head_weight(f"{prefix}{name}.weight", head_dim, config.rope)
            .to(torch.float32, copy=True)
            .add_(1.0)
            for name in ("q_norm", "k_norm")
        )
        self.attention = factory.attention(
            params, AttentionWeights(rotary, q_norm, k_norm, eps), prefix=prefix, feeds=_PLAIN
        )

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Attend from x, [T, hidden_size]; the output has the same shape."""
        projected = self.projection(x)
        gate, qkv = projected[:, : self._num_gates], projected[:, self._num_gates :].contiguous()
        attended = self.attention(qkv, meta)
        assert isinstance(attended, torch.Tensor)
        return self.output(attended.mul_(gate.sigmoid()))


class GatedDeltaNet:
    """A Gated DeltaNet with its projections."""

    input_quantization: RowQuantization | None = None
    """Two products read the input, one of which keeps its precision."""

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory, prefix: str) -> None:
        params, hidden = config.delta_net, config.hidden_size
        keys, values = params.num_key_heads * params.key_dim, params.num_values
        q, k, v = factory.sharding.delta_net(params)
        if config.has_fused_projections:
            heads = factory.sharding.part(params.num_key_heads)
            shared = params.num_value_heads // params.num_key_heads
            sizes = [params.key_dim, params.key_dim, shared * params.value_dim, shared * params.value_dim]
            qkvz_sizes = {prefix + "in_proj_qkvz": 2 * keys + 2 * values}
            qkvz = {prefix + "in_proj_qkvz": by_part(heads, sizes)}
            ba_sizes = {prefix + "in_proj_ba": 2 * params.num_value_heads}
            ba = {prefix + "in_proj_ba": by_part(heads, [shared, shared])}
        else:
            qkvz_sizes = {prefix + "in_proj_qkv": params.num_channels, prefix + "in_proj_z": values}
            qkvz = {
                prefix + "in_proj_qkv": [q, *_moved([k], keys), *_moved([v], 2 * keys)],
                prefix + "in_proj_z": [v],
            }
            own = factory.sharding.part(params.num_value_heads)
            ba_sizes = dict.fromkeys((prefix + "in_proj_b", prefix + "in_proj_a"), params.num_value_heads)
            ba = {name: [own] for name in ba_sizes}
        self.qkvz = factory.selected_linear(qkvz_sizes, qkvz, hidden)
        self.ba = factory.selected_linear(ba_sizes, ba, hidden, keeps_precision=True)
        self.delta_net = factory.delta_net(prefix, params, config.rms_norm_eps)
        self.output = factory.row_linear(prefix + "out_proj", values, hidden)

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Apply the layer to x, [T, hidden_size]; the output has the same shape."""
        return self.output(self.delta_net(self.qkvz(x), self.ba(x), meta))


def runs(order: Sequence[int]) -> list[range]:
    """Return an order of indices as ranges."""
    found: list[range] = []
    for index in order:
        if found and found[-1].stop == index:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found


def by_part(groups: range, sizes: Sequence[int]) -> list[range]:
    """Return rows that lie group by group, each with parts of these sizes, part by part."""
    size = sum(sizes)
    return [
        range(group * size + sum(sizes[:part]), group * size + sum(sizes[: part + 1]))
        for part in range(len(sizes))
        for group in groups
    ]


def _moved(ranges: Sequence[range], start: int) -> list[range]:
    return [range(each.start + start, each.stop + start) for each in ranges]


class HybridLayer:
    """A Gated DeltaNet or gated attention, and an MLP, each after an RMSNorm.

    Args:
        params: of attention; None: the layer is a Gated DeltaNet.
    """

    def __init__(
        self,
        config: Qwen3NextConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams | None,
        rotary: RotaryEmbedding,
        mlp: MLP,
    ) -> None:
        prefix, hidden, eps = f"model.layers.{index}.", config.hidden_size, config.rms_norm_eps
        self.mixer: GatedAttention | GatedDeltaNet
        if params is None:
            self.mixer = GatedDeltaNet(config, factory, prefix + "linear_attn.")
        else:
            self.mixer = GatedAttention(config, factory, prefix + "self_attn.", params, rotary)
        self.input_norm = factory.input_norm(
            prefix + "input_layernorm", hidden, eps, feeds=self.mixer, adds_one=True
        )
        self.mlp = mlp
        self.post_norm = factory.input_norm(
            prefix + "post_attention_layernorm", hidden, eps, feeds=mlp, adds_one=True
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on x + residual, both [T, hidden_size]; return the output as such a pair. See
        `llama.DecoderLayer`."""
        if residual is None:
            residual, normed = x, self.input_norm(x)
        else:
            normed = self.input_norm.after_adding(x, residual)
        mixed = self.mixer(normed, meta)
        return self.mlp(self.post_norm.after_adding(mixed, residual), meta.slot_mapping), residual

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


class Qwen3Next:
    """Embedding, layers, final norm and output head."""

    checkpoint_prefix = "model."
    ignored_tensors = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory) -> None:
        self.config = config
        vocab_size, hidden = config.vocab_size, config.hidden_size
        before = factory.before_layers(is_tied=config.tie_word_embeddings)
        self.embedding = before.embedding("model.embed_tokens.weight", vocab_size, hidden)
        rotary = factory.rotary(config.rope, config.head_dim)
        attention = iter(config.attention_layers)
        self.layers = [
            HybridLayer(
                config,
                factory,
                index,
                next(attention) if kind == "full_attention" else None,
                rotary,
                make_mlp(config, factory, f"model.layers.{index}.", index),
            )
            for index, kind in enumerate(config.layer_types)
        ]
        after = factory.after_layers()
        self.norm = after.rms_norm("model.norm", hidden, config.rms_norm_eps, adds_one=True)
        self.lm_head = after.output_head(self.embedding, vocab_size, is_tied=config.tie_word_embeddings)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.mixer.attention for layer in self.layers if isinstance(layer.mixer, GatedAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of each Gated DeltaNet."""
        return [
            layer.mixer.delta_net.state for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)
        ]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size]; see `CausalLM.forward`."""
        x = self.embedding(inputs.token_ids) if inputs.hidden is None else inputs.hidden
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs.meta)
        return x if residual is None else residual.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to hidden [R, hidden_size]."""
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] of hidden [R, hidden_size]. Pass only the rows to sample."""
        return self.lm_head.logits(self.norm(hidden))

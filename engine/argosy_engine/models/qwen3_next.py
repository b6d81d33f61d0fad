"""Qwen3-Next and Qwen3.5: Gated DeltaNets (arXiv 2412.06464) in most layers, gated attention in the others.

A Gated DeltaNet keeps a state per request instead of keys and values. Attention is Qwen3's with two differences: only
the leading elements of a head are rotated, and a gate of each element of the heads' outputs is projected beside the
queries. All norms but those within the Gated DeltaNets multiply by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from argosy_engine.attention.backend import (
    Attention,
    AttentionMetadata,
    AttentionWeights,
    RotaryEmbedding,
    StateLayer,
)
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.hybrid_config import Qwen3NextConfig
from argosy_engine.models.decoder import Decoder, MixerLayer
from argosy_engine.models.llama import make_mlp
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


class Qwen3Next(Decoder[MixerLayer[GatedAttention | GatedDeltaNet]]):
    """See `Decoder`."""

    def __init__(self, config: Qwen3NextConfig, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(config, factory, config.rms_norm_eps, adds_one=True)

    def make_layers(self, factory: LayerFactory) -> list[MixerLayer[GatedAttention | GatedDeltaNet]]:
        config = self.config
        rotary = factory.rotary(config.rope, config.head_dim)
        attention = dict(zip(config.layers_with_attention, config.attention_layers, strict=True))
        layers = []
        for index in factory.own_indices(config.num_hidden_layers):
            kind = config.layer_types[index]
            prefix = f"model.layers.{index}."
            mlp = make_mlp(config, factory, prefix, index)
            mixer: GatedAttention | GatedDeltaNet
            if kind == "full_attention":
                mixer = GatedAttention(config, factory, prefix + "self_attn.", attention[index], rotary)
            else:
                mixer = GatedDeltaNet(config, factory, prefix + "linear_attn.")
            layers.append(MixerLayer(config, factory, prefix, config.rms_norm_eps, mixer, mlp, adds_one=True))
        return layers

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.mixer.attention for layer in self.layers if isinstance(layer.mixer, GatedAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of each Gated DeltaNet."""
        return [
            layer.mixer.delta_net.state for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)
        ]

"""Lfm2Config: the config of LFM2, with experts or without, whose layers are short convolutions and, some of them,
attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from argosy_engine.attention.params import ShortConvParams, StateParams
from argosy_engine.model_configs.experts_config import ExpertNames
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.model_configs.model_config import NotOurs, RawConfig, flag, layer_count


class Lfm2Config(LlamaConfig, frozen=True, kw_only=True):
    """Qwen3's decoder with short convolutions in place of attention in some layers."""

    layer_types: tuple[Literal["conv", "full_attention"], ...]
    conv_kernel_size: Annotated[int, Meta(ge=2, le=64)]
    conv_bias: bool
    """Of the convolution and its projections."""

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")

    @property
    def layers_with_attention(self) -> list[int]:
        return [index for index, kind in enumerate(self.layer_types) if kind == "full_attention"]

    @property
    def layers_with_state(self) -> list[int]:
        return [index for index, kind in enumerate(self.layer_types) if kind == "conv"]

    @property
    def short_conv(self) -> ShortConvParams:
        """Constants of each short convolution."""
        return ShortConvParams(num_channels=self.hidden_size, kernel_size=self.conv_kernel_size)

    @property
    def state_layers(self) -> tuple[StateParams, ...]:
        return (self.short_conv.state,) * len(self.layers_with_state)

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        return sizes | {"hidden_size": self.hidden_size}

    @classmethod
    def differences(cls, raw: RawConfig) -> dict[str, Any]:
        layers, has_experts = layer_count(raw), raw["architectures"][0] == "Lfm2MoeForCausalLM"
        kinds = raw.get("layer_types")
        if kinds is None and has_experts:
            raise NotOurs("its config has no layer_types")
        if kinds is None:
            indices = raw.get("full_attn_idxs")
            with_attention = range(layers) if indices is None else indices
            kinds = ["full_attention" if index in with_attention else "conv" for index in range(layers)]
        kinds = [{"attention": "full_attention"}.get(each, each) for each in kinds]
        if others := sorted(set(kinds) - {"conv", "full_attention"}):
            raise NotOurs(f"layer type {others[0]!r} is not supported, only conv and full_attention")
        if "full_attention" not in kinds:
            raise NotOurs("no layer has attention")
        return {
            "intermediate_size": raw.get("intermediate_size", 7168)
            if has_experts
            else _intermediate_size(raw),
            "rms_norm_eps": raw.get("norm_eps", 1e-5),
            "num_key_value_heads": raw.get("num_key_value_heads", 8),
            "qk_norm": "head",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 1e6,
            "positions": raw.get("max_position_embeddings", 128000),
            "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
            "layer_types": kinds,
            "conv_kernel_size": raw.get("conv_L_cache", 3),
            "conv_bias": bool(raw.get("conv_bias", False)),
            "experts": _experts(raw) if has_experts else None,
        }


def _experts(raw: RawConfig) -> dict[str, Any]:
    num_dense = raw.get("num_dense_layers", 2)
    return {
        "routing": {
            "num_experts": raw.get("num_experts", 32),
            "experts_per_token": raw.get("num_experts_per_tok", 4),
            "scores": "sigmoid",
            "normalises": flag(raw, "norm_topk_prob", True),
            "epsilon": 1e-6,
            "scaling": raw.get("routed_scaling_factor", 1.0),
            "has_correction": flag(raw, "use_expert_bias", True),
        },
        "inner": raw.get("moe_intermediate_size", 1792),
        "is_sparse": tuple(index >= num_dense for index in range(layer_count(raw))),
        "mlp": "feed_forward.",
        "names": ExpertNames(gate="w1", up="w3", down="w2", correction="expert_bias"),
    }


def _intermediate_size(raw: RawConfig) -> int:
    size: int = raw.get("block_ff_dim", raw.get("intermediate_size", 12288))
    if not raw.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of", 256)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple

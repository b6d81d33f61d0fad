"""Qwen3NextConfig: the config of Qwen3-Next and Qwen3.5, whose layers are Gated DeltaNets (arXiv 2412.06464) and, as a
rule one in four, gated attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from argosy_engine.attention.params import DeltaNetParams, StateParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.experts_config import ExpertNames
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.model_configs.llama_families import qwen_sparse
from argosy_engine.model_configs.model_config import RawConfig, layer_count

_Heads = Annotated[int, Meta(ge=1, le=4096)]


class Qwen3NextConfig(LlamaConfig, frozen=True, kw_only=True):
    """Qwen3's decoder with gated attention in some layers and Gated DeltaNets in the others."""

    layer_types: tuple[Literal["linear_attention", "full_attention"], ...]
    linear_num_key_heads: _Heads
    linear_num_value_heads: _Heads
    linear_key_head_dim: Annotated[int, Meta(ge=1, le=512)]
    linear_value_head_dim: Annotated[int, Meta(ge=1, le=512)]
    linear_conv_kernel_dim: Annotated[int, Meta(ge=2, le=64)]
    has_fused_projections: bool
    """Whether the checkpoint has the projections of a Gated DeltaNet in two tensors, ordered by key heads (Qwen3-Next),
    rather than in four."""

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")
        if "full_attention" not in self.layer_types:
            raise ValueError("no layer is full_attention")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.linear_num_key_heads}"
            )

    @property
    def layers_with_attention(self) -> list[int]:
        return [index for index, kind in enumerate(self.layer_types) if kind == "full_attention"]

    @property
    def layers_with_state(self) -> list[int]:
        return [index for index, kind in enumerate(self.layer_types) if kind == "linear_attention"]

    @property
    def delta_net(self) -> DeltaNetParams:
        """Constants of each Gated DeltaNet."""
        return DeltaNetParams(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            kernel_size=self.linear_conv_kernel_dim,
        )

    @property
    def state_layers(self) -> tuple[StateParams, ...]:
        return (self.delta_net.state,) * len(self.layers_with_state)

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        if "linear_attention" in self.layer_types:
            sizes["linear_num_key_heads"] = self.linear_num_key_heads
        return sizes

    @classmethod
    def differences(cls, raw: RawConfig) -> dict[str, Any]:
        architecture, layers = raw["architectures"][0], layer_count(raw)
        # transformers ignores both fields
        if raw.get("attn_output_gate") is False:
            raise ConfigError("attention without an output gate (attn_output_gate) is not supported")
        if (gate := raw.get("output_gate_type")) not in (None, "silu", "swish"):
            raise ConfigError(f"output_gate_type {gate!r} is not supported, only swish")
        interval = raw.get("full_attention_interval", 4)
        is_next = architecture == "Qwen3NextForCausalLM"
        is_dense = architecture == "Qwen3_5ForCausalLM"
        fields = {
            "num_key_value_heads": raw.get("num_key_value_heads", 4 if is_dense else 2),
            "head_dim": raw.get("head_dim", 256),
            "qk_norm": "head",
            "mlp_bias": False,
            "positions": raw.get("max_position_embeddings", 32768),
            "partial_rotary_factor": 0.25,
            "layer_types": raw.get("layer_types")
            or [
                "linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)
            ],
            "linear_num_key_heads": raw.get("linear_num_key_heads", 16),
            "linear_num_value_heads": raw.get("linear_num_value_heads", 32),
            "linear_key_head_dim": raw.get("linear_key_head_dim", 128),
            "linear_value_head_dim": raw.get("linear_value_head_dim", 128),
            "linear_conv_kernel_dim": raw.get("linear_conv_kernel_dim", 4),
            "has_fused_projections": is_next,
        }
        if is_dense:
            return fields
        inner = raw.get("moe_intermediate_size", 512)
        if not is_next:
            fields["intermediate_size"] = inner  # no layer is dense
        return fields | {
            "experts": {
                "routing": {
                    "num_experts": raw.get("num_experts", 512 if is_next else 256),
                    "experts_per_token": raw.get("num_experts_per_tok", 10 if is_next else 8),
                    "normalises": raw.get("norm_topk_prob", True) if is_next else True,
                },
                "inner": inner,
                "is_sparse": qwen_sparse(raw) if is_next else (True,) * layers,
                "shared_size": raw.get("shared_expert_intermediate_size", 512),
                "shared": "shared_expert",
                "has_shared_gate": True,
                "names": ExpertNames() if is_next else ExpertNames(or_stacked=("gate_up_proj", "down_proj")),
            }
        }

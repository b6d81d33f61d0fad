"""Qwen3NextConfig: the config of Qwen3-Next and Qwen3.5, whose layers are Gated DeltaNets (arXiv 2412.06464) and, as a
rule one in four, gated attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from argosy_engine.attention.params import AttentionParams, DeltaNetParams, StateParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.model_configs.model_config import RawConfig, Size, layer_count

_Heads = Annotated[int, Meta(ge=1, le=4096)]
_Count = Annotated[int, Meta(ge=0, le=4096)]


class Qwen3NextConfig(LlamaConfig, frozen=True, kw_only=True):
    """Qwen3's decoder with gated attention in some layers and Gated DeltaNets in the others, and with sparse MLPs if it
    has experts."""

    layer_types: tuple[Literal["linear_attention", "full_attention"], ...]
    rotary_dim: Annotated[int, Meta(ge=2, le=4096, multiple_of=2)]
    """Leading elements of a head that are rotated."""
    linear_num_key_heads: _Heads
    linear_num_value_heads: _Heads
    linear_key_head_dim: Annotated[int, Meta(ge=1, le=512)]
    linear_value_head_dim: Annotated[int, Meta(ge=1, le=512)]
    linear_conv_kernel_dim: Annotated[int, Meta(ge=2, le=64)]
    has_fused_projections: bool
    """Whether the checkpoint has the projections of a Gated DeltaNet in two tensors, ordered by key heads (Qwen3-Next),
    rather than in four."""
    num_experts: _Count = 0
    """0: all MLPs are dense."""
    num_experts_per_tok: _Count = 0
    moe_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    shared_expert_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    mlp_only_layers: tuple[int, ...] = ()

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
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"the rotated part {self.rotary_dim} exceeds head_dim {self.head_dim}")
        if self.num_experts and not (
            1 <= self.num_experts_per_tok <= self.num_experts and self.moe_intermediate_size
        ):
            raise ValueError(
                f"num_experts {self.num_experts} with num_experts_per_tok {self.num_experts_per_tok} and "
                f"moe_intermediate_size {self.moe_intermediate_size}"
            )

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        """Constants of the layers with attention, in their order."""
        params = super().attention_layers
        return tuple(
            params[index] for index, kind in enumerate(self.layer_types) if kind == "full_attention"
        )

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
        return (self.delta_net.state,) * self.layer_types.count("linear_attention")

    @property
    def num_routed_experts(self) -> int:
        return self.num_experts

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        if "linear_attention" in self.layer_types:
            sizes["linear_num_key_heads"] = self.linear_num_key_heads
        sparse = [self.is_sparse(index) for index in range(self.num_hidden_layers)]
        if all(sparse):
            del sizes["intermediate_size"]  # of dense layers
        if any(sparse):
            sizes["shared_expert_intermediate_size"] = self.shared_expert_intermediate_size
            if not has_whole_experts:
                sizes["moe_intermediate_size"] = self.moe_intermediate_size
        return sizes

    def is_sparse(self, index: int) -> bool:
        """Whether a layer's MLP is sparse."""
        return (
            self.num_experts > 0
            and index not in self.mlp_only_layers
            and (index + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        architecture = raw["architectures"][0]
        layers = layer_count(raw)
        if raw.get("attn_output_gate") is False:
            raise ConfigError("attention without an output gate (attn_output_gate) is not supported")
        interval = raw.get("full_attention_interval", 4)
        layer_types = raw.get("layer_types") or [
            "linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers)
        ]
        head_dim = raw.get("head_dim", 256)
        factor, whole = _rotated_part(raw)
        fields = {
            **super().fields_of(whole),
            "num_key_value_heads": raw.get("num_key_value_heads"),
            "head_dim": head_dim,
            "max_position_embeddings": raw.get("max_position_embeddings", 32768),
            "sliding_windows": (None,) * layers,
            "qk_norm": True,
            "layer_types": layer_types,
            "rotary_dim": int(head_dim * factor),
            "linear_num_key_heads": raw.get("linear_num_key_heads", 16),
            "linear_num_value_heads": raw.get("linear_num_value_heads", 32),
            "linear_key_head_dim": raw.get("linear_key_head_dim", 128),
            "linear_value_head_dim": raw.get("linear_value_head_dim", 128),
            "linear_conv_kernel_dim": raw.get("linear_conv_kernel_dim", 4),
            "has_fused_projections": architecture == "Qwen3NextForCausalLM",
        }
        if architecture == "Qwen3_5ForCausalLM":
            return fields
        shared = raw.get("shared_expert_intermediate_size", 512)
        fields |= {
            "num_experts": raw.get("num_experts"),
            "num_experts_per_tok": raw.get("num_experts_per_tok"),
            "moe_intermediate_size": raw.get("moe_intermediate_size"),
            "shared_expert_intermediate_size": shared,
        }
        if architecture == "Qwen3NextForCausalLM":
            return fields | {
                "norm_topk_prob": raw.get("norm_topk_prob", True),
                "decoder_sparse_step": raw.get("decoder_sparse_step", 1),
                "mlp_only_layers": raw.get("mlp_only_layers") or (),
            }
        return fields | {"intermediate_size": shared}  # no layer is dense


def _rotated_part(raw: RawConfig) -> tuple[float, dict[str, Any]]:
    """Return the share of a head that is rotated, and the config without it."""
    whole, entries = dict(raw), [raw.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    given = [entry.get("partial_rotary_factor") for entry in entries if entry][:1]
    factor = next((each for each in (*given, raw.get("partial_rotary_factor")) if each is not None), 0.25)
    whole.pop("partial_rotary_factor", None)
    for name, entry in zip(("rope_scaling", "rope_parameters"), entries, strict=True):
        if entry:
            whole[name] = {key: value for key, value in entry.items() if key != "partial_rotary_factor"}
    return factor, whole

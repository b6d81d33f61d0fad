"""HybridConfig: the configs of decoders of which layers keep a state per request, in place of attention or beside it:
Mamba-2 (arXiv 2405.21060) in Granite 4, Bamba, Falcon-H1 and Nemotron-H, Gated DeltaNets (arXiv 2412.06464) in
Qwen3-Next and Qwen3.5, short convolutions in LFM2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from argosy_engine.attention.params import DeltaNetParams, MambaParams, ShortConvParams, StateParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.experts_config import ExpertNames
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.model_configs.llama_families import GRANITE_EXPERTS, granite, mixtral_experts, qwen_sparse
from argosy_engine.model_configs.model_config import (
    NotOurs,
    Positive,
    RawConfig,
    flag,
    layer_count,
    times,
)
from argosy_engine.model_configs.rope_config import shared_rope_fields

LayerType = Literal["linear_attention", "full_attention", "hybrid", "mlp", "moe"]
"""What mixes a layer's tokens: a Mamba layer, attention, or the sum of both, by transformers' names. Layers of
Nemotron-H are one of the first two, without an MLP, or an MLP or a mixture of experts alone."""
_SINGLE: tuple[LayerType, ...] = ("linear_attention", "full_attention", "mlp", "moe")
_Heads = Annotated[int, Meta(ge=1, le=4096)]


class HybridConfig(LlamaConfig, frozen=True, kw_only=True):
    """Llama's decoder with layers that keep a state per request, in place of attention or beside it."""

    kinds_with_attention: ClassVar[tuple[str, ...]] = ("full_attention",)
    kinds_with_state: ClassVar[tuple[str, ...]] = ("linear_attention",)

    layer_types: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_hidden_layers} layers")

    @property
    def layers_with_attention(self) -> list[int]:
        return [index for index, kind in enumerate(self.layer_types) if kind in self.kinds_with_attention]

    @property
    def layers_with_state(self) -> list[int]:
        return [index for index, kind in enumerate(self.layer_types) if kind in self.kinds_with_state]


class HybridMultipliers(Struct, frozen=True, kw_only=True):
    """Factors of Falcon-H1 (arXiv 2507.22448) on what parts of a layer get or give."""

    mamba_input: Positive = 1.0
    mamba_projected: tuple[Positive, Positive, Positive, Positive, Positive] = (1.0,) * 5
    """On z, x, B, C and dt."""
    mamba_output: Positive = 1.0
    attention_input: Positive = 1.0
    attention_output: Positive = 1.0
    gate: Positive = 1.0
    """On an MLP's gate, before its activation."""
    mlp_output: Positive = 1.0


class MambaHybridConfig(HybridConfig, frozen=True, kw_only=True):
    """Llama's decoder with Mamba layers in place of attention in some layers."""

    kinds_with_attention: ClassVar = ("full_attention", "hybrid")
    kinds_with_state: ClassVar = ("linear_attention", "hybrid")

    layer_types: tuple[LayerType, ...]
    mamba_num_heads: _Heads
    mamba_head_dim: Annotated[int, Meta(ge=1, le=1024)]
    mamba_num_groups: _Heads
    mamba_state_size: Annotated[int, Meta(ge=1, le=1024)]
    mamba_kernel_size: Annotated[int, Meta(ge=2, le=64)]
    mamba_norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    """See `MambaParams`."""
    mamba_conv_bias: bool
    mamba_bias: bool
    """Of the input projection."""
    mamba_output_bias: bool
    """Of the output projection."""
    multipliers: HybridMultipliers = HybridMultipliers()
    has_single_blocks: bool = False
    """Whether a layer is either a mixer or an MLP (Nemotron-H)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mamba_num_heads % self.mamba_num_groups:
            raise ValueError(
                f"{self.mamba_num_heads} heads of Mamba are not a multiple of {self.mamba_num_groups} groups"
            )

    @property
    def mamba(self) -> MambaParams:
        """Constants of each Mamba layer."""
        return MambaParams(
            num_heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            num_groups=self.mamba_num_groups,
            state_size=self.mamba_state_size,
            kernel_size=self.mamba_kernel_size,
            norm=self.mamba_norm,
        )

    @property
    def state_layers(self) -> tuple[StateParams, ...]:
        return (self.mamba.state,) * len(self.layers_with_state)

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        if not self.has_single_blocks or "mlp" in self.layer_types:
            sizes["intermediate_size"] = self.intermediate_size  # of what all tokens take beside experts, too
        else:
            sizes.pop("intermediate_size", None)
        if self.state_layers:
            sizes["number of Mamba heads"] = self.mamba_num_heads
        return sizes

    @property
    def shared_sizes(self) -> dict[str, int]:
        groups = {"number of Mamba groups": self.mamba_num_groups} if self.state_layers else {}
        return super().shared_sizes | groups

    def replicated_state_elements(self, tensor_parallel_size: int) -> int:
        share = self.mamba_num_groups / tensor_parallel_size
        return int(2 * self.hidden_size * (max(share, 1) - share) * self.mamba_state_size)

    @classmethod
    def num_layers(cls, raw: RawConfig) -> int:
        is_nemotron = raw["architectures"][0] == "NemotronHForCausalLM"
        return len(_nemotron_layers(raw)) if is_nemotron else super().num_layers(raw)

    @classmethod
    def check_activation(cls, raw: RawConfig) -> None:
        if raw["architectures"][0] == "NemotronHForCausalLM":
            _check_nemotron(raw)
        else:
            super().check_activation(raw)

    @classmethod
    def differences(cls, raw: RawConfig) -> dict[str, Any]:
        _check_time_steps(raw)
        return _DIFFERENCES[raw["architectures"][0]](raw)


def _check_time_steps(raw: RawConfig) -> None:
    """Refuse bounds of step sizes: transformers applies them in prompts and not while it decodes, so that tokens would
    depend on how a sequence is cut into steps."""
    limit = raw.get("mamba_dt_limit", raw.get("time_step_limit", (0.0, math.inf)))
    bounds = [math.inf if each in ("Infinity", {"__float__": "Infinity"}) else each for each in limit or ()]
    if bounds != [0.0, math.inf]:
        raise NotOurs(f"time_step_limit {limit} is not supported, only 0 to infinity")


def _mamba(raw: RawConfig, inner: int) -> dict[str, Any]:
    """Return the fields of the Mamba layers by the names that Granite, Bamba and Falcon-H1 share.

    Args:
        inner: elements of all heads.
    """
    heads, head_dim = raw.get("mamba_n_heads", 128), raw.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = inner // heads
    if head_dim * heads != inner:
        raise ConfigError(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} are not the {inner} elements of a layer"
        )
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "mamba_num_groups": raw.get("mamba_n_groups", 1),
        "mamba_state_size": raw.get("mamba_d_state", 256),
        "mamba_kernel_size": raw.get("mamba_d_conv", 4),
        "mamba_conv_bias": bool(raw.get("mamba_conv_bias", True)),
        "mamba_bias": bool(raw.get("mamba_proj_bias", False)),
        "mamba_output_bias": bool(raw.get("mamba_proj_bias", False)),
    }


_PRESENT_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def _layer_types(kinds: Any) -> tuple[str, ...]:
    """Return layer types by their present names.

    Raises:
        NotOurs: there is another, or no attention.
    """
    found = tuple(_PRESENT_NAMES.get(each, each) for each in kinds)
    if others := sorted(set(found) - {"linear_attention", "full_attention"}):
        raise NotOurs(f"layer type {others[0]!r} is not supported, only linear_attention and full_attention")
    if "full_attention" not in found:
        raise NotOurs("no layer has attention")
    return found


def _granite_hybrid(raw: RawConfig) -> dict[str, Any]:
    layers = layer_count(raw)
    kinds = raw.get("layers_block_type") or raw.get("layer_types") or ["linear_attention"] * layers
    rotates = raw.get("position_embedding_type") == "rope"
    shared = raw.get("shared_intermediate_size", 1024)
    fields: dict[str, Any] = {
        **_mamba(raw, times(raw.get("mamba_expand", 2), raw["hidden_size"])),
        **granite(raw),
        "layer_types": _layer_types(kinds),
        "unrotated_layers": () if rotates else tuple(range(layers)),
        "mlp_bias": False,
        "intermediate_size": shared,
    }
    if raw.get("num_local_experts", 8):
        experts = mixtral_experts(raw, GRANITE_EXPERTS)
        fields["experts"] = {**experts, "inner": raw.get("intermediate_size", 11008)}
    return fields


def _bamba(raw: RawConfig) -> dict[str, Any]:
    with_attention = raw.get("attn_layer_indices") or ()
    positions = raw.get("max_position_embeddings", 262144)
    rope = shared_rope_fields(raw, max_position_embeddings=positions, is_partial=True)
    # Only the entry's: transformers overwrites one beside it.
    part = (raw.get("rope_scaling") or raw.get("rope_parameters") or {}).get("partial_rotary_factor")
    kinds = ["attention" if index in with_attention else "mamba" for index in range(layer_count(raw))]
    return {
        **_mamba(raw, times(raw.get("mamba_expand", 2), raw["hidden_size"])),
        "layer_types": _layer_types(kinds),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "num_key_value_heads": raw.get("num_key_value_heads", 8) or raw.get("num_attention_heads"),
        "positions": positions,
        "rope": {**rope, "partial_rotary_factor": 0.5 if part is None else part},
    }


def _falcon_h1(raw: RawConfig) -> dict[str, Any]:
    layers, inner = layer_count(raw), raw.get("mamba_d_ssm", 1024)
    if inner is None:
        inner = times(raw.get("mamba_expand", 2), raw["hidden_size"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    norm = None
    if raw.get("mamba_rms_norm", False):
        norm = "before_gate" if raw.get("mamba_norm_before_gate", True) else "after_gate"
    gate, mlp_output = raw.get("mlp_multipliers") or (1.0, 1.0)
    return {
        **_mamba(raw, inner),
        "mamba_norm": norm,
        "mamba_output_bias": bool(raw.get("projectors_bias", False)),
        "layer_types": ("hybrid",) * layers,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "num_key_value_heads": raw.get("num_key_value_heads", 8) or raw.get("num_attention_heads"),
        "positions": raw.get("max_position_embeddings", 8192),
        # q k grows with k, and rotations do not change lengths.
        "attention_multiplier": raw.get("key_multiplier", 1.0) * head_dim**-0.5,
        "embedding_multiplier": raw.get("embedding_multiplier", 1.0),
        "logits_scaling": 1.0 / raw.get("lm_head_multiplier", 1.0),
        "multipliers": {
            "mamba_input": raw.get("ssm_in_multiplier", 1.0),
            "mamba_projected": raw.get("ssm_multipliers") or (1.0,) * 5,
            "mamba_output": raw.get("ssm_out_multiplier", 1.0),
            "attention_input": raw.get("attention_in_multiplier", 1.0),
            "attention_output": raw.get("attention_out_multiplier", 1.0),
            "gate": gate,
            "mlp_output": mlp_output,
        },
    }


def _nemotron_layers(raw: RawConfig) -> tuple[str, ...]:
    """Return the layers of a Nemotron-H, whose number no field of its config changes.

    Raises:
        ConfigError: there are none, too many, or of other kinds.
    """
    kinds = raw.get("layer_types")  # the alias wins in transformers
    if kinds is None:
        kinds = raw.get("layers_block_type")
    if kinds is None:
        letters = dict(zip("M*-E", _SINGLE, strict=True))
        pattern = raw.get("hybrid_override_pattern", "ME*-")
        kinds = [letters.get(letter, letter) for letter in pattern]
    layer_count({"layers": len(kinds)}, "layers")
    found = tuple(_PRESENT_NAMES.get(each, each) for each in kinds)
    if others := sorted(set(found) - set(_SINGLE)):
        raise ConfigError(f"layer type {others[0]!r} is not supported, only {', '.join(_SINGLE)}")
    return found


def _check_nemotron(raw: RawConfig) -> None:
    """
    Raises:
        NotOurs: it asks for what our code does not compute.
    """
    has_experts, has_latents = "moe" in _nemotron_layers(raw), bool(raw.get("moe_latent_size"))
    for name, default, allowed in (
        ("mlp_hidden_act", "relu2", ("relu2",)),
        ("mamba_hidden_act", "silu", ("silu", "swish")),
        ("tie_word_embeddings", False, (False,)),
        ("sliding_window", None, (None,)),
        *([("n_shared_experts", 1, (1,))] if has_experts else ()),
        *([("mlp_bias", False, (False, None))] if has_experts and has_latents else ()),
    ):
        if (found := raw.get(name, default)) not in allowed:
            raise NotOurs(f"{name} {found!r} is not supported for Nemotron-H, only {allowed[0]!r}")


def _nemotron_h(raw: RawConfig) -> dict[str, Any]:
    layers, hidden = _nemotron_layers(raw), raw.get("hidden_size", 4096)
    if "full_attention" not in layers:
        raise NotOurs("no layer has attention")
    heads, has_bias = raw.get("num_attention_heads", 32), flag(raw, "use_bias")
    fields: dict[str, Any] = {
        "vocab_size": raw.get("vocab_size", 131072),
        "hidden_size": hidden,
        "intermediate_size": raw.get("intermediate_size", 21504),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads", 8) or heads,
        "head_dim": raw.get("head_dim", 128),
        "attention_bias": False,
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "positions": raw.get("max_position_embeddings", 4096),
        "rope": {"kind": "default"},  # which no layer has
        "layer_types": layers,
        "has_single_blocks": True,
        "mamba_num_heads": raw.get("mamba_num_heads", 128),
        "mamba_head_dim": raw.get("mamba_head_dim", 64),
        "mamba_num_groups": raw.get("mamba_n_groups", raw.get("n_groups", 8)),
        "mamba_state_size": raw.get("ssm_state_size", 128),
        "mamba_kernel_size": raw.get("mamba_d_conv", raw.get("conv_kernel", 4)),
        "mamba_conv_bias": bool(raw.get("mamba_conv_bias", raw.get("use_conv_bias", True))),
        "mamba_bias": has_bias,
        "mamba_output_bias": has_bias,
    }
    if "moe" in layers:
        fields["experts"] = {
            "routing": {
                "num_experts": raw.get("num_local_experts", raw.get("n_routed_experts", 8)),
                "experts_per_token": raw.get("num_experts_per_tok", 2),
                "scores": "sigmoid",
                "normalises": raw.get("norm_topk_prob", True),
                "scaling": raw.get("routed_scaling_factor", 1.0),
                "has_correction": True,
                "num_groups": raw.get("n_group", 1),
                "groups_per_token": raw.get("topk_group", 1),
            },
            "inner": raw.get("moe_intermediate_size", 7688),
            "is_sparse": tuple(kind == "moe" for kind in layers),
            "activation": "relu2",
            "has_float32_router": True,
            "mlp": "mixer.",
            "shared_size": raw.get("moe_shared_expert_intermediate_size", 7688),
            "latent_size": raw.get("moe_latent_size") or 0,
        }
    return fields


_DIFFERENCES: Mapping[str, Callable[[RawConfig], dict[str, Any]]] = {
    "BambaForCausalLM": _bamba,
    "FalconH1ForCausalLM": _falcon_h1,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "NemotronHForCausalLM": _nemotron_h,
}
"""By the architecture, what `LlamaConfig.differences` returns."""


class Qwen3NextConfig(HybridConfig, frozen=True, kw_only=True):
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
        super().__post_init__()
        if "full_attention" not in self.layer_types:
            raise ValueError("no layer is full_attention")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.linear_num_key_heads}"
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


class Lfm2Config(HybridConfig, frozen=True, kw_only=True):
    """Qwen3's decoder with short convolutions in place of attention in some layers."""

    kinds_with_state: ClassVar = ("conv",)

    layer_types: tuple[Literal["conv", "full_attention"], ...]
    conv_kernel_size: Annotated[int, Meta(ge=2, le=64)]
    conv_bias: bool
    """Of the convolution and its projections."""

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
            else _lfm2_intermediate_size(raw),
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
            "experts": _lfm2_experts(raw) if has_experts else None,
        }


def _lfm2_experts(raw: RawConfig) -> dict[str, Any]:
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


def _lfm2_intermediate_size(raw: RawConfig) -> int:
    size: int = raw.get("block_ff_dim", raw.get("intermediate_size", 12288))
    if not raw.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of", 256)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple

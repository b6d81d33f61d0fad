"""The configs of Gemma 1 and 2 and the text parts of Gemma 3 and 4: dense, with experts, or with embeddings of each
layer (Gemma 4 E2B, E4B).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.experts_config import ExpertNames, ExpertsConfig
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    NotOurs,
    Positive,
    RawConfig,
    Size,
    flag,
    layer_count,
    sliding_windows_of,
)
from argosy_engine.model_configs.rope_config import RopeParameters, rope_fields, shared_rope_fields

_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Of configs without `rope_parameters`."""

_Heads = Annotated[int, Meta(ge=1, le=4096)]


LayerType = Literal["sliding_attention", "full_attention"]


class GemmaConfig(ModelConfig, frozen=True, kw_only=True):
    """A decoder whose layers alternate between local attention (a sliding window) and global attention: Gemma 2 (arXiv
    2408.00118) and Gemma 3 (arXiv 2503.19786)."""

    refused_dtypes: ClassVar = {"float16": "its activations exceed float16's range"}

    intermediate_size: Size
    rms_norm_eps: Positive
    rope_global: RopeParameters
    rope_local: RopeParameters
    qk_norm: bool
    """RMSNorm on each head of q and k before RoPE (Gemma 3)."""
    attention_bias: bool
    query_pre_attn_scalar: Positive
    """Scores are divided by its square root."""
    attn_logit_softcapping: Positive | None
    final_logit_softcapping: Positive | None
    has_output_norms: bool = True
    """Whether attention and MLP have a norm after them as well."""

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        scale, cap = self.query_pre_attn_scalar**-0.5, self.attn_logit_softcapping
        return tuple(replace(layer, scale=scale, logit_softcap=cap) for layer in super().attention_layers)

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        is_gemma1, is_gemma3 = (
            raw["architectures"][0] == name for name in ("GemmaForCausalLM", "Gemma3ForCausalLM")
        )
        cls.check_activation(raw)
        if raw.get("use_bidirectional_attention"):
            raise ConfigError("bidirectional attention is not supported")
        layers = layer_count(raw)
        # Every sixth layer of Gemma 3 is global, and every second one of Gemma 2.
        period = raw.get("sliding_window_pattern", 6) if is_gemma3 else 2
        positions, head_dim = raw.get("max_position_embeddings", 8192), raw.get("head_dim", 256)
        rope_global, rope_local = _rope(raw, is_gemma3, positions)
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": layers,
            "num_attention_heads": raw.get("num_attention_heads"),
            "num_key_value_heads": raw.get("num_key_value_heads"),
            "head_dim": head_dim,
            "max_position_embeddings": positions,
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": (None,) * layers
            if is_gemma1
            else sliding_windows_of(
                raw, raw.get("sliding_window", 4096), lambda index: index % period != period - 1
            ),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "rope_global": rope_global,
            "rope_local": rope_local,
            "qk_norm": is_gemma3,
            "attention_bias": raw.get("attention_bias", False),
            "query_pre_attn_scalar": head_dim if is_gemma1 else raw.get("query_pre_attn_scalar", 256),
            "attn_logit_softcapping": None
            if is_gemma1 or is_gemma3
            else raw.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": None
            if is_gemma1
            else raw.get("final_logit_softcapping", None if is_gemma3 else 30.0),
            "has_output_norms": not is_gemma1,
        }

    @classmethod
    def check_activation(cls, raw: RawConfig) -> None:
        """
        Raises:
            ConfigError: MLPs have another activation than ours compute.
        """
        activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
        if activation != "gelu_pytorch_tanh":
            raise ConfigError(f"activation {activation!r} is not supported, only gelu_pytorch_tanh")


class Gemma1Config(GemmaConfig, frozen=True, kw_only=True):
    """Gemma (arXiv 2403.08295): Gemma 2 without local attention, soft caps and norms of outputs."""

    refused_dtypes: ClassVar = {}

    @classmethod
    def check_activation(cls, raw: RawConfig) -> None:
        # Published configs say gelu and mean its approximation; transformers reads no `hidden_activation` here.
        if (activation := raw.get("hidden_act", "gelu_pytorch_tanh")) not in ("gelu", "gelu_pytorch_tanh"):
            raise NotOurs(f"activation {activation!r} is not supported, only gelu_pytorch_tanh")


def _rope(raw: RawConfig, is_gemma3: bool, positions: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the RoPE fields of global and of local layers.

    Newer Gemma 3 configs have one entry per layer type, older ones two bases. Gemma 2 uses the same RoPE in all layers.
    """
    if not is_gemma3:
        both = shared_rope_fields(raw, max_position_embeddings=positions)
        return both, both
    entries = raw.get("rope_parameters") or {}
    if not entries.keys() <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            "rope_parameters must have RoPE by layer type: full_attention and sliding_attention"
        )
    scaled = {**(entries.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = entries.get("sliding_attention") or {}
    return (
        rope_fields(scaled, theta=raw.get("rope_theta") or 1e6, max_position_embeddings=positions),
        rope_fields(
            local, theta=raw.get("rope_local_base_freq") or 10000.0, max_position_embeddings=positions
        ),
    )


class Gemma4Config(ModelConfig, frozen=True, kw_only=True):
    """Gemma 3's decoder with other heads in global layers, a norm of values, and scores that are not scaled."""

    refused_dtypes: ClassVar = {"float16": "its activations exceed float16's range"}

    intermediate_size: Size
    rms_norm_eps: Positive
    layer_types: tuple[LayerType, ...]
    head_dims: tuple[_Heads, ...]
    """Of each layer."""
    kv_heads: tuple[_Heads, ...]
    """Of each layer."""
    rope_global: RopeParameters
    rope_local: RopeParameters | None
    """None: no layer has a window."""
    attention_bias: bool
    has_keys_as_values: bool
    """Whether global layers have one projection for both (`attention_k_eq_v`)."""
    final_logit_softcapping: Positive | None
    num_kv_shared_layers: Annotated[int, Meta(ge=0, le=4096)]
    """Layers at the end that attend to the keys and values of the last layer of their type before them."""
    has_wide_shared_mlps: bool
    """Whether MLPs of those have twice the features (`use_double_wide_mlp`)."""
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=1 << 24)]
    """Elements of the embedding of a token that each layer has of its own; 0: none has."""
    experts: ExpertsConfig | None
    """Beside the MLP of each layer; None: there are none."""
    placeholder_token_ids: tuple[int, ...]
    """Tokens for images, video and sound, which the wrapper embeds as `pad_token_id`."""
    pad_token_id: Annotated[int, Meta(ge=0, le=1 << 24)]

    def __post_init__(self) -> None:
        for name, counted in (("layer_types", self.layer_types), ("per_layer_config", self.head_dims)):
            if len(counted) != self.num_hidden_layers:
                raise ValueError(f"{len(counted)} {name} for {self.num_hidden_layers} layers")
        for kv_heads in self.kv_heads:
            if self.num_attention_heads % kv_heads:
                raise ValueError(
                    f"num_attention_heads {self.num_attention_heads} is not a multiple of num_global_key_value_heads "
                    f"{kv_heads}"
                )
        if missing := {*self.layer_types} - {*self.layer_types[: max(self.first_shared_layer, 0)]}:
            raise ValueError(
                f"num_kv_shared_layers {self.num_kv_shared_layers} leaves no {min(missing)} whose keys and values "
                "layers could share"
            )
        for index, kv_heads in enumerate(self.kv_heads):
            if (source := self.source_of(index)) is not None and kv_heads != self.kv_heads[source]:
                raise ValueError(
                    f"layer {index} has {kv_heads} KV heads, and layer {source}, whose keys and values it shares, "
                    f"{self.kv_heads[source]}"
                )
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id {self.pad_token_id} is not in the vocabulary of {self.vocab_size}"
            )
        for index, kind in enumerate(self.layer_types):
            self.rope_of(kind).rotary_dim(self.head_dims[index])

    def rope_of(self, kind: LayerType) -> RopeParameters:
        """Return the RoPE of layers of a type that there is."""
        rope = self.rope_global if kind == "full_attention" else self.rope_local
        assert rope is not None
        return rope

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer that shares keys and values; the number of layers if none does."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def source_of(self, index: int) -> int | None:
        """Return the layer whose keys and values a layer attends to; None: its own."""
        first, kind = self.first_shared_layer, self.layer_types[index]
        if index < first:
            return None
        return first - 1 - self.layer_types[:first][::-1].index(kind)

    def inner_of(self, index: int) -> int:
        """Return the features of a layer's MLP."""
        is_wide = self.has_wide_shared_mlps and index >= self.first_shared_layer
        return self.intermediate_size * (2 if is_wide else 1)

    def takes_keys_as_values(self, index: int) -> bool:
        return self.has_keys_as_values and self.layer_types[index] == "full_attention"

    @property
    def params_of_layers(self) -> tuple[AttentionParams, ...]:
        """Constants of each layer's attention."""
        layers: list[AttentionParams] = []
        for layer, head_dim, kv_heads in zip(
            super().attention_layers, self.head_dims, self.kv_heads, strict=True
        ):
            assert isinstance(layer, AttentionParams)
            layers.append(replace(layer, scale=1.0, head_dim=head_dim, num_kv_heads=kv_heads))
        return tuple(layers)

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        """Constants of the layers that have keys and values of their own."""
        return tuple(self.params_of_layers[index] for index in self.layers_with_attention)

    @property
    def layers_with_attention(self) -> range:
        """Indices of the layers that `attention_layers` has."""
        return range(self.first_shared_layer)

    @property
    def undivided_stages(self) -> str | None:
        if self.num_kv_shared_layers:
            return "its layers share keys and values (num_kv_shared_layers)"
        if self.hidden_size_per_layer_input:
            return "its layers have embeddings of their own (hidden_size_per_layer_input)"
        return None

    @property
    def num_routed_experts(self) -> int:
        return 0 if self.experts is None else self.experts.routing.num_experts

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        if self.experts is not None and not has_whole_experts:
            sizes["moe_intermediate_size"] = self.experts.inner
        return sizes

    @property
    def shared_sizes(self) -> dict[str, int]:
        counts = super().shared_sizes
        for count, kind in zip(self.kv_heads, self.layer_types, strict=True):
            if count not in counts.values():
                name = "num_global_key_value_heads" if kind == "full_attention" else "num_key_value_heads"
                counts[f"{name} ({len(counts)})" if name in counts else name] = count
        return counts

    def cached_values(self, tensor_parallel_size: int) -> int:
        ranks = [layer.of_rank(tensor_parallel_size) for layer in self.attention_layers]
        return max(2 * layer.num_kv_heads * layer.head_dim for layer in ranks)

    def replicated_elements(self, tensor_parallel_size: int) -> int:
        elements = 0.0
        for layer in self.attention_layers:
            share = layer.num_kv_heads / tensor_parallel_size
            elements += 2 * self.hidden_size * (max(share, 1) - share) * layer.head_dim
        return int(elements / len(self.attention_layers))

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        shared = "|".join(str(index) for index in range(self.first_shared_layer, self.num_hidden_layers))
        names = rf"model\.layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        return (*super().unused_tensors, *([names] if shared else []))

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
        if activation != "gelu_pytorch_tanh":
            raise NotOurs(f"activation {activation!r} is not supported, only gelu_pytorch_tanh")
        if (attends := raw.get("use_bidirectional_attention")) not in (None, "vision"):
            raise ConfigError(f"use_bidirectional_attention {attends!r}: tokens attend to those after them")
        layers = layer_count(raw)
        kinds = raw.get("layer_types") or [
            "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(layers)
        ]
        kinds = [*kinds[:-1], "full_attention"]  # whatever the config has there
        head_dims, kv_heads = _gemma4_heads(raw, kinds)
        vocab_size, own_vocab = raw.get("vocab_size"), raw.get("vocab_size_per_layer_input", 262144)
        per_layer = raw.get("hidden_size_per_layer_input", 256) or 0
        if per_layer and own_vocab != vocab_size:
            raise NotOurs(f"vocab_size_per_layer_input {own_vocab} is not vocab_size {vocab_size}")
        return {
            "vocab_size": vocab_size,
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": layers,
            "num_attention_heads": raw.get("num_attention_heads"),
            "num_key_value_heads": raw.get("num_key_value_heads", 4),
            "head_dim": raw.get("head_dim", 256),
            "max_position_embeddings": raw.get("max_position_embeddings", 131072),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": sliding_windows_of({"layer_types": kinds}, raw.get("sliding_window", 512)),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "layer_types": kinds,
            "head_dims": head_dims,
            "kv_heads": kv_heads,
            "rope_global": _gemma4_rope(raw, "full_attention"),
            "rope_local": _gemma4_rope(raw, "sliding_attention") if "sliding_attention" in kinds else None,
            "attention_bias": flag(raw, "attention_bias"),
            "has_keys_as_values": flag(raw, "attention_k_eq_v"),
            "final_logit_softcapping": raw.get("final_logit_softcapping"),
            "num_kv_shared_layers": raw.get("num_kv_shared_layers", 0),
            "has_wide_shared_mlps": flag(raw, "use_double_wide_mlp"),
            "hidden_size_per_layer_input": per_layer,
            "experts": _gemma4_experts(raw) if flag(raw, "enable_moe_block") else None,
            "placeholder_token_ids": raw.get("placeholder_token_ids") or (),
            "pad_token_id": raw.get("pad_token_id", 0) or 0,
        }


def _gemma4_heads(raw: RawConfig, kinds: list[str]) -> tuple[list[Any], list[Any]]:
    """Return the sizes of heads and the numbers of KV heads of the layers.

    transformers writes what differs from layer to layer into `per_layer_config`; published configs have fields of
    global layers.
    """
    own = raw.get("head_dim", 256), raw.get("num_key_value_heads", 4)
    other = raw.get("global_head_dim", 512), own[1]
    if flag(raw, "attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
        other = other[0], raw["num_global_key_value_heads"]
    layers = [other if kind == "full_attention" else own for kind in kinds]
    if (overrides := raw.get("per_layer_config")) is not None:
        layers = [own] * len(kinds)
        for index, fields in overrides.items():
            if more := sorted(set(fields) - {"head_dim", "num_key_value_heads"}):
                raise NotOurs(f"per_layer_config has {more[0]}")
            if not 0 <= int(index) < len(layers):
                raise ConfigError(f"per_layer_config has layer {index}, of {len(layers)} layers")
            layers[int(index)] = fields.get("head_dim", own[0]), fields.get("num_key_value_heads", own[1])
    for kind in sorted(set(kinds)):
        if len({dim for (dim, _), each in zip(layers, kinds, strict=True) if each == kind}) > 1:
            raise NotOurs(f"heads of layers of {kind} differ in size")
    head_dims, kv_heads = zip(*layers, strict=True)
    return list(head_dims), list(kv_heads)


def _gemma4_rope(raw: RawConfig, kind: str) -> dict[str, Any]:
    entries = raw.get("rope_parameters")
    entry = (_GEMMA4_ROPE if entries is None else entries).get(kind)
    if entry is None:
        raise NotOurs(f"rope_parameters has no {kind}")
    rope_type = entry.get("rope_type") or entry.get("type") or "default"
    rope = {"kind": rope_type, "theta": entry.get("rope_theta", 1e4)}
    part = entry.get("partial_rotary_factor")
    if rope_type == "proportional":
        rope["factor"] = entry.get("factor", 1.0)
        rope["partial_rotary_factor"] = 1.0 if part is None else part
    elif rope_type == "linear" and part in (None, 1):
        rope["factor"] = entry["factor"]
    elif rope_type != "default":  # which has no parts, whatever the field says
        raise NotOurs(f"RoPE scaling {rope_type!r} is not supported; there is: default, linear, proportional")
    return rope


def _gemma4_experts(raw: RawConfig) -> dict[str, Any]:
    return {
        "routing": {
            "num_experts": raw.get("num_experts"),
            "experts_per_token": raw.get("top_k_experts"),
            "normalises": True,
            "has_expert_scales": True,
        },
        "inner": raw.get("moe_intermediate_size"),
        "is_sparse": (True,) * layer_count(raw),
        "activation": "gelu_pytorch_tanh",
        "mlp": "",
        "names": ExpertNames(
            or_stacked=("gate_up_proj", "down_proj"), router="router.proj", scales="router.per_expert_scale"
        ),
    }

"""DeepseekConfig: the config of DeepSeek V2 and V3, and of decoders of their form: Kimi-K2, which calls itself V3, and
GLM-4.7-Flash."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.llama_config import scaled_positions
from argosy_engine.model_configs.model_config import ModelConfig, Positive, RawConfig, Size, layer_count
from argosy_engine.model_configs.rope_config import RopeParameters, shared_rope_fields

_V2, _V3, _GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {**_MLA, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_routed_experts": 64,
          "num_experts_per_tok": None, "n_shared_experts": 2, "moe_intermediate_size": 1407, "n_group": None,
          "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
          "num_nextn_predict_layers": 0},
    _V3: {**_MLA, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256,
          "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "n_group": 8,
          "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
          "num_nextn_predict_layers": 1},
    _GLM: {**_MLA, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
           "max_position_embeddings": 202752, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
           "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
           "norm_topk_prob": True, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1},
}  # fmt: skip
"""Of fields that a config may leave out, as transformers fills them in."""
_METHODS = {_V2: ("greedy", "group_limited_greedy"), _V3: ("noaux_tc",), _GLM: ("noaux_tc",)}
"""How each chooses experts."""
_SCORES = {_V2: "softmax", _V3: "sigmoid", _GLM: "sigmoid"}
_MAX_NEXTN = 64
_FALLBACK = "; use --model-impl transformers"

Rank = Annotated[int, Meta(ge=1, le=1 << 16)]
HeadDim = Annotated[int, Meta(ge=1, le=4096)]
Count = Annotated[int, Meta(ge=0, le=4096)]


class DeepseekConfig(ModelConfig, frozen=True, kw_only=True):
    """RMSNorm before each block, multi-head latent attention, gated SiLU MLPs: dense ones first, then experts."""

    intermediate_size: Size
    """Of the dense MLPs."""
    rms_norm_eps: Positive
    rope: RopeParameters
    q_lora_rank: Rank | None
    """Width that queries are compressed to; None: they are projected at once."""
    kv_lora_rank: Rank
    qk_nope_head_dim: HeadDim
    qk_rope_head_dim: Annotated[int, Meta(ge=2, le=4096, multiple_of=2)]
    v_head_dim: HeadDim
    rope_interleave: bool
    """Whether pairs that are rotated are neighbours."""
    attention_bias: bool
    """Bias on the compressing projections and on the output projection."""
    mlp_bias: bool
    n_routed_experts: Count
    """0: all MLPs are dense."""
    num_experts_per_tok: Count
    n_shared_experts: Count
    """Experts that every token takes, computed as one MLP."""
    moe_intermediate_size: Size
    sparse_layers: tuple[bool, ...]
    """Whether each layer has experts."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    n_group: Annotated[int, Meta(ge=1, le=4096)]
    topk_group: Annotated[int, Meta(ge=1, le=4096)]
    norm_topk_prob: bool
    routed_scaling_factor: Positive
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=_MAX_NEXTN)]
    """Layers after the last that predict further tokens (multi-token prediction). They are not loaded."""

    def __post_init__(self) -> None:
        if not self.n_routed_experts:
            return
        if not 1 <= self.num_experts_per_tok <= self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is not between 1 and n_routed_experts "
                f"{self.n_routed_experts}"
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_group {self.n_group} does not divide n_routed_experts {self.n_routed_experts}, or topk_group "
                f"{self.topk_group} exceeds it"
            )
        if self.num_experts_per_tok > self.topk_group * (self.n_routed_experts // self.n_group):
            raise ValueError(
                f"topk_group {self.topk_group} groups have fewer experts than num_experts_per_tok"
            )

    @property
    def attention_layers(self) -> tuple[LatentAttentionParams, ...]:
        scale, extent = self.head_dim**-0.5, self.rope.mscale_all_dim
        if self.rope.kind == "yarn" and extent:
            scale *= self.rope.yarn_scale(extent) ** 2
        layer = LatentAttentionParams(
            num_heads=self.num_attention_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            scale=scale,
            rope_interleave=self.rope_interleave,
        )
        return (layer,) * self.num_hidden_layers

    @property
    def num_routed_experts(self) -> int:
        return self.n_routed_experts if any(self.sparse_layers) else 0

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        first = self.num_hidden_layers
        beyond = range(first, first + self.num_nextn_predict_layers)
        return tuple(rf"model\.layers\.{index}\..*" for index in beyond)

    def cached_values(self, tensor_parallel_size: int) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def replicated_elements(self, tensor_parallel_size: int) -> int:
        width = (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim
        return int(self.hidden_size * width * (1 - 1 / tensor_parallel_size))

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        if any(self.sparse_layers) and (self.n_shared_experts or not has_whole_experts):
            sizes["moe_intermediate_size"] = self.moe_intermediate_size
        if all(self.sparse_layers):
            del sizes["intermediate_size"]  # of dense layers
        return sizes

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        architecture = raw["architectures"][0]
        _refuse(raw, architecture)
        fields = {name: raw.get(name, value) for name, value in _DEFAULTS[architecture].items()}
        sparse = _sparse_layers(raw, fields.pop("first_k_dense_replace", None), fields["n_routed_experts"])
        positions = fields.pop("max_position_embeddings")
        rope = shared_rope_fields(raw, max_position_embeddings=positions)
        if rope["kind"] not in ("default", "yarn"):
            raise ConfigError(f"RoPE scaling {rope['kind']!r} is not supported for {architecture}{_FALLBACK}")
        heads = raw.get("num_attention_heads")
        if raw.get("num_key_value_heads") not in (None, heads):
            raise ConfigError(
                f"num_key_value_heads {raw['num_key_value_heads']}: with multi-head latent attention every one of the "
                f"{heads} heads has keys of its own"
            )
        if architecture == _GLM and raw.get("head_dim") not in (None, fields["qk_rope_head_dim"]):
            raise ConfigError(f"head_dim {raw['head_dim']} is not qk_rope_head_dim")
        return {
            **fields,
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": raw.get("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
            "rope": rope,
            "max_position_embeddings": scaled_positions(rope, positions),
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "sliding_windows": (None,) * layer_count(raw),
            "rope_interleave": architecture == _V2 or bool(raw.get("rope_interleave", True)),
            "attention_bias": bool(raw.get("attention_bias", False)),
            "mlp_bias": architecture == _V2 and bool(raw.get("mlp_bias", False)),
            "sparse_layers": sparse,
            "n_routed_experts": fields["n_routed_experts"] or 0,
            "num_experts_per_tok": fields["num_experts_per_tok"] or 0,
            "n_shared_experts": fields["n_shared_experts"] or 0,
            "n_group": fields["n_group"] or 1,
            "topk_group": fields["topk_group"] or 1,
            "norm_topk_prob": bool(fields["norm_topk_prob"]),
        }


def _refuse(raw: RawConfig, architecture: str) -> None:
    """
    Raises:
        ConfigError: the config asks for something that the family does not compute.
    """
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"activation {raw['hidden_act']!r} is not supported, only silu")
    method, scores = raw.get("topk_method"), raw.get("scoring_func")
    if method is not None and method not in _METHODS[architecture]:
        raise ConfigError(
            f"topk_method {method!r} is not supported for {architecture}, only {' and '.join(_METHODS[architecture])}"
        )
    if scores not in (None, _SCORES[architecture]):
        raise ConfigError(
            f"scoring_func {scores!r} is not supported for {architecture}, only {_SCORES[architecture]}"
        )
    if architecture == _V2 and raw.get("norm_topk_prob"):
        raise ConfigError(
            f"norm_topk_prob is not supported for {architecture}: its published code and transformers disagree on "
            f"what it means there{_FALLBACK}"
        )


def _sparse_layers(raw: RawConfig, first: Any, num_experts: Any) -> tuple[bool, ...]:
    """Return whether each layer has experts.

    Args:
        first: `first_k_dense_replace`; None: `mlp_layer_types` says it, or all layers but the first have them.
    """
    layers = range(layer_count(raw))
    if not num_experts:
        return (False,) * len(layers)
    if first is not None:
        frequency = raw.get("moe_layer_freq") or 1
        return tuple(index >= first and index % frequency == 0 for index in layers)
    kinds = raw.get("mlp_layer_types") or ["dense", *["sparse"] * (len(layers) - 1)]
    if len(kinds) != len(layers) or not {*kinds} <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types must be dense or sparse for each of {len(layers)} layers")
    return tuple(kind == "sparse" for kind in kinds)

"""DeepseekConfig: the config of DeepSeek V2 and V3, and of decoders of their form: Kimi-K2, which calls itself V3, and
GLM-4.7-Flash."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from argosy_engine.attention.params import LatentAttentionParams
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.llama_config import scaled_positions
from argosy_engine.model_configs.llama_families import sparse_by_type
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    NotOurs,
    Positive,
    RawConfig,
    Size,
    flag,
    layer_count,
    times,
)
from argosy_engine.model_configs.rope_config import RopeParameters, shared_rope_fields

_V2, _V3, _GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rms_norm_eps": 1e-6}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {**_MLA, "max_position_embeddings": 2048, "num_key_value_heads": None},
    _V3: {**_MLA, "max_position_embeddings": 4096, "num_key_value_heads": 128},
    _GLM: {**_MLA, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
           "max_position_embeddings": 202752, "num_key_value_heads": 20},
}  # fmt: skip
"""Of fields that a config may leave out, as transformers fills them in."""
_EXPERT_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {"n_routed_experts": 64, "num_experts_per_tok": None, "n_shared_experts": 2, "moe_intermediate_size": 1407,
          "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None},
    _V3: {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
          "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    _GLM: {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
           "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
}  # fmt: skip
_METHODS = {_V2: ("greedy", "group_limited_greedy"), _V3: ("noaux_tc",), _GLM: ("noaux_tc",)}
"""How each chooses experts (`topk_method`)."""
_SCORES: dict[str, Literal["softmax", "sigmoid"]] = {_V2: "softmax", _V3: "sigmoid", _GLM: "sigmoid"}

Rank = Annotated[int, Meta(ge=1, le=1 << 16)]
HeadDim = Annotated[int, Meta(ge=1, le=4096)]


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
    attention_bias: bool
    """Bias on the compressing projections and on the output projection."""
    mlp_bias: bool
    experts: ExpertsConfig | None
    """None: all MLPs are dense."""

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
        )
        return (layer,) * self.num_hidden_layers

    @property
    def num_routed_experts(self) -> int:
        return 0 if self.experts is None else self.experts.routing.num_experts

    def cached_values(self, tensor_parallel_size: int) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def expanded_values(self, tensor_parallel_size: int) -> int:
        layer = self.attention_layers[0].of_rank(tensor_parallel_size)
        return layer.num_heads * layer.expanded_dim

    def replicated_elements(self, tensor_parallel_size: int) -> int:
        width = (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_dim
        return int(self.hidden_size * width * (1 - 1 / tensor_parallel_size))

    def divided_sizes(self, *, has_whole_experts: bool) -> dict[str, int]:
        sizes = super().divided_sizes(has_whole_experts=has_whole_experts)
        return sizes if self.experts is None else self.experts.divided_sizes(sizes, has_whole_experts)

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        architecture = raw["architectures"][0]
        if (activation := raw.get("hidden_act", "silu")) != "silu":
            raise NotOurs(f"activation {activation!r} is not supported, only silu")
        fields = {name: raw.get(name, value) for name, value in _DEFAULTS[architecture].items()}
        positions = fields.pop("max_position_embeddings")
        rope = shared_rope_fields(raw, max_position_embeddings=positions)
        if rope["kind"] not in ("default", "yarn"):
            raise NotOurs(f"RoPE scaling {rope['kind']!r} is not supported for {architecture}")
        is_interleaved = architecture == _V2 or flag(raw, "rope_interleave", True)
        heads, rotated = raw.get("num_attention_heads"), fields["qk_rope_head_dim"]
        if (kv_heads := fields.pop("num_key_value_heads")) not in (None, heads):
            raise ConfigError(
                f"num_key_value_heads {kv_heads}: with multi-head latent attention each of the "
                f"{heads} heads has keys of its own"
            )
        if architecture != _V2 and raw.get("head_dim") not in (
            None,
            rotated,
        ):  # by which transformers rotates
            raise ConfigError(f"head_dim {raw['head_dim']} is not qk_rope_head_dim {rotated}")
        longest = scaled_positions(rope, positions)
        _check_window(raw, longest)
        return {
            **fields,
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": raw.get("hidden_size"),
            "intermediate_size": raw.get("intermediate_size"),
            "num_hidden_layers": layer_count(raw),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": fields["qk_nope_head_dim"] + rotated,
            "rope": {**rope, "is_interleaved": is_interleaved},
            "max_position_embeddings": longest,
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "sliding_windows": (None,) * layer_count(raw),
            "attention_bias": flag(raw, "attention_bias"),
            "mlp_bias": architecture == _V2 and flag(raw, "mlp_bias"),
            "experts": _experts(raw, architecture),
            "num_multi_token_layers": 0
            if architecture == _V2
            else raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers")) or 1,
        }


def _check_window(raw: RawConfig, positions: int) -> None:
    """
    Raises:
        ConfigError: the config asks for a window, which neither our code nor transformers' computes for these models.
    """
    window = raw.get("sliding_window")
    is_used = flag(raw, "use_sliding_window", True)
    if (is_used and window is not None and window < positions) or "sliding_attention" in (
        raw.get("layer_types") or ()
    ):
        raise ConfigError(
            f"sliding_window {window}: latent attention is to all tokens before, here and in transformers; if the "
            'model was trained without a window, add --hf-overrides \'{"sliding_window": null, "layer_types": null}\', '
            f"{OTHER_ENGINES}"
        )


def _experts(raw: RawConfig, architecture: str) -> dict[str, Any] | None:
    """Return the fields of `ExpertsConfig`; None if all layers are dense.

    Raises:
        ConfigError: experts are chosen in another way than the architecture's.
    """
    fields = {name: raw.get(name, value) for name, value in _EXPERT_DEFAULTS[architecture].items()}
    if (counted := raw.get("num_experts" if architecture == _V2 else "num_local_experts")) is not None:
        fields["n_routed_experts"] = counted  # in transformers' attribute map, which wins
    methods, scores = _METHODS[architecture], _SCORES[architecture]
    method, normalises = (
        raw.get("topk_method") or methods[0],
        flag(raw, "norm_topk_prob", architecture != _V2),
    )
    if method not in methods:
        raise ConfigError(
            f"topk_method {method!r} is not supported for {architecture}, only {' and '.join(methods)}"
        )
    if (found := raw.get("scoring_func") or scores) != scores:
        raise ConfigError(f"scoring_func {found!r} is not supported for {architecture}, only {scores}")
    if architecture == _V2 and normalises:
        raise ConfigError(
            f"norm_topk_prob is not supported for {architecture}: the code that its authors published and that of "
            "transformers disagree about it; --model-impl transformers does as the latter"
        )
    is_sparse = _sparse_layers(raw, architecture)
    if not fields["n_routed_experts"] or not any(is_sparse):
        return None
    groups = [
        1 if method == "greedy" or (each := fields[name]) is None else each
        for name in ("n_group", "topk_group")
    ]
    return {
        "routing": {
            "num_experts": fields["n_routed_experts"],
            "experts_per_token": fields["num_experts_per_tok"],
            "scores": scores,
            "normalises": normalises,
            "scaling": fields["routed_scaling_factor"],
            "has_correction": method == "noaux_tc",
            "num_groups": groups[0],
            "groups_per_token": groups[1],
            "group_score": "best" if architecture == _V2 else "best_two",
        },
        "has_float32_router": True,
        "inner": fields["moe_intermediate_size"],
        "is_sparse": is_sparse,
        "shared_size": times(fields["moe_intermediate_size"], fields["n_shared_experts"] or 0),
    }


def _sparse_layers(raw: RawConfig, architecture: str) -> tuple[bool, ...]:
    """Return whether each layer has experts."""
    if architecture == _GLM:
        return sparse_by_type(raw)
    first, every = (
        raw.get("first_k_dense_replace", 3 if architecture == _V3 else 0),
        raw.get("moe_layer_freq"),
    )
    return tuple(index >= first and index % (every or 1) == 0 for index in range(layer_count(raw)))

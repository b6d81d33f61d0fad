"""What config.json means in the families that are Llama but for their configs: for each architecture the fields of
LlamaConfig that are not as in Llama, with defaults, because transformers gives a missing field its family's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.experts_config import ExpertNames
from argosy_engine.model_configs.model_config import (
    NotOurs,
    RawConfig,
    flag,
    layer_count,
    sliding_windows_of,
    times,
)
from argosy_engine.model_configs.rope_config import rope_fields


def _all(raw: RawConfig, window: Any) -> tuple[Any, ...]:
    return (window,) * layer_count(raw)


def _first_dense(raw: RawConfig, count: Any) -> tuple[bool, ...]:
    return tuple(index >= count for index in range(layer_count(raw)))


def _head_dim(raw: RawConfig, default: int) -> Any:
    """Return the head's size, of a family that has a default."""
    return raw.get("head_dim", default) or raw["hidden_size"] // raw["num_attention_heads"]


def _llama(raw: RawConfig) -> dict[str, Any]:
    return {}


def _mistral(raw: RawConfig) -> dict[str, Any]:
    window = raw.get("sliding_window", 4096)
    if raw.get("layer_types"):  # Ministral 8B, which transformers takes for another model type
        windows = sliding_windows_of(raw, window)
    else:
        windows = _all(raw, window)
    return {
        "positions": raw.get("max_position_embeddings", 131072),
        "sliding_windows": windows,
    }


def _ministral3(raw: RawConfig) -> dict[str, Any]:
    entry = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    beta, trained = entry.get("llama_4_scaling_beta"), entry.get("original_max_position_embeddings")
    if beta is None or trained is None:
        raise NotOurs("its RoPE has no llama_4_scaling_beta or no original_max_position_embeddings")
    return {
        "head_dim": _head_dim(raw, 128),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "sliding_windows": _all(raw, raw.get("sliding_window")),
        "temperature": {"beta": beta, "original_max_position_embeddings": trained} if beta else None,
    }


def _qwen2(raw: RawConfig) -> dict[str, Any]:
    has_bias = flag(raw, "attention_bias", True)
    windows = _all(raw, None)
    if flag(raw, "use_sliding_window"):
        first = raw.get("max_window_layers", 28)
        windows = sliding_windows_of(raw, raw.get("sliding_window", 4096), lambda index: index >= first)
    return {
        "attention_bias": has_bias,
        "output_bias": False,
        "positions": raw.get("max_position_embeddings", 32768),
        "sliding_windows": windows,
    }


def _qwen3(raw: RawConfig) -> dict[str, Any]:
    has_bias = flag(raw, "attention_bias")
    return {
        **_qwen2(raw),
        "head_dim": _head_dim(raw, 128),
        "qk_norm": "head",
        "attention_bias": has_bias,
        "output_bias": has_bias,
    }


def sparse_by_type(raw: RawConfig) -> tuple[bool, ...]:
    """Return which layers have experts, by `mlp_layer_types`; without it all but the first.

    Raises:
        ConfigError: the list is of another length, or has other types.
    """
    layers = layer_count(raw)
    kinds = raw.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types must be dense or sparse for each of {layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def qwen_sparse(raw: RawConfig) -> tuple[bool, ...]:
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
    return tuple(
        index not in dense and step > 0 and (index + 1) % step == 0 for index in range(layer_count(raw))
    )


def _qwen3_moe(raw: RawConfig) -> dict[str, Any]:
    is_text_part, names = raw.get("model_type") == "qwen3_vl_moe_text", ExpertNames()
    if is_text_part:
        inner, hidden = raw["moe_intermediate_size"], raw["hidden_size"]
        if hidden in (inner, 2 * inner):
            raise NotOurs(f"experts of {inner} features, of which shapes do not tell how they are stored")
        names = ExpertNames(or_stacked=("gate_up_proj", "down_proj"), may_be_transposed=True)
    window = raw.get("sliding_window", 4096) if flag(raw, "use_sliding_window") else None
    return {
        **_qwen3(raw),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "sliding_windows": _all(raw, window),
        "experts": {
            "routing": {
                "num_experts": raw.get("num_experts") or raw.get("num_local_experts"),
                "experts_per_token": raw.get("num_experts_per_tok"),
                "normalises": is_text_part or raw.get("norm_topk_prob", False),
            },
            "inner": raw.get("moe_intermediate_size"),
            "is_sparse": qwen_sparse(raw),
            "names": names,
        },
    }


def _qwen2_moe(raw: RawConfig) -> dict[str, Any]:
    has_bias = flag(raw, "qkv_bias", True)
    windows = _all(raw, None)
    if flag(raw, "use_sliding_window"):
        first = raw.get("max_window_layers", 28)
        windows = sliding_windows_of(
            raw, raw.get("sliding_window", 4096), lambda index: (index + 1) % 2 and index < first
        )
    return {
        "attention_bias": has_bias,
        "output_bias": False,
        "positions": raw.get("max_position_embeddings", 32768),
        "sliding_windows": windows,
        "experts": {
            "routing": {
                "num_experts": raw.get("num_experts", 60),
                "experts_per_token": raw.get("num_experts_per_tok", 4),
                "normalises": raw.get("norm_topk_prob", False),
            },
            "inner": raw.get("moe_intermediate_size", 1408),
            "is_sparse": qwen_sparse(raw),
            "shared_size": raw.get("shared_expert_intermediate_size", 5632),
            "shared": "shared_expert",
            "has_shared_gate": True,
        },
    }


_MIXTRAL_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def mixtral_experts(raw: RawConfig, names: ExpertNames) -> dict[str, Any]:
    return {
        "routing": {
            "num_experts": raw.get("num_local_experts", 8),
            "experts_per_token": raw.get("num_experts_per_tok", 2),
            "normalises": True,
        },
        "inner": raw.get("intermediate_size"),
        "is_sparse": _all(raw, True),
        "mlp": "block_sparse_moe.",
        "names": names,
    }


def _mixtral(raw: RawConfig) -> dict[str, Any]:
    return {
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "rope_theta": 1e6,
        "positions": raw.get("max_position_embeddings", 131072),
        "sliding_windows": _all(raw, raw.get("sliding_window")),
        "experts": mixtral_experts(raw, _MIXTRAL_NAMES),
    }


def _minimax_m2(raw: RawConfig) -> dict[str, Any]:
    head_dim, rotary_dim = raw.get("head_dim") or 128, raw.get("rotary_dim")
    return {
        "head_dim": head_dim,
        "qk_norm": "width",
        "rope_theta": 5e6,
        "partial_rotary_factor": 1.0 if rotary_dim is None else rotary_dim / head_dim,
        "positions": raw.get("max_position_embeddings", 196608),
        "num_multi_token_layers": raw.get("num_mtp_modules") or 0,
        "experts": {
            "routing": {
                "num_experts": raw.get("num_local_experts", 256),
                "experts_per_token": raw.get("num_experts_per_tok", 8),
                "scores": "sigmoid",
                "normalises": True,
                "has_correction": True,
            },
            "has_float32_router": True,
            "inner": raw.get("intermediate_size"),
            "is_sparse": _all(raw, True),
            "mlp": "block_sparse_moe.",
            "names": replace(_MIXTRAL_NAMES, correction="e_score_correction_bias"),
        },
    }


def _phi3(raw: RawConfig) -> dict[str, Any]:
    entry = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if (entry.get("rope_type") or entry.get("type") or "default") != "default":
        raise NotOurs("Phi-3's RoPE scaling depends on the length of the request")
    return {
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "attention_bias": False,
        "mlp_bias": False,
        "positions": raw.get("max_position_embeddings", 4096),
        "partial_rotary_factor": 1.0,
        "has_fused_qkv": True,
        "has_fused_mlp": True,
        "sliding_windows": _all(raw, raw.get("sliding_window")),
    }


def granite(raw: RawConfig) -> dict[str, Any]:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {name: raw.get(name, 1.0) for name in names}


GRANITE_EXPERTS = ExpertNames(
    experts="", stacked=("input_linear.weight", "output_linear.weight"), router="router.layer"
)


def _granite_moe(raw: RawConfig) -> dict[str, Any]:
    return {**granite(raw), "experts": mixtral_experts(raw, GRANITE_EXPERTS)}


def _rotating(raw: RawConfig) -> list[bool]:
    """Return which layers have RoPE, by `no_rope_layers`, in which they have a 1."""
    layers, every = layer_count(raw), raw.get("no_rope_layer_interval", 4)
    rotates = raw.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(layers)]
    if len(rotates) < layers:
        raise ConfigError(f"{len(rotates)} no_rope_layers for {layers} layers")
    return [bool(each) for each in rotates[:layers]]


def _unrotated(rotates: list[bool]) -> tuple[int, ...]:
    return tuple(index for index, each in enumerate(rotates) if not each)


def _llama4(raw: RawConfig) -> dict[str, Any]:
    layers, rotates = layer_count(raw), _rotating(raw)
    inner, chunk = raw.get("intermediate_size", 8192), raw.get("attention_chunk_size", 8192)
    kinds = raw.get("layer_types") or [
        "chunked_attention" if each and chunk is not None else "full_attention" for each in rotates
    ]
    if len(kinds) != layers:
        raise ConfigError(f"{len(kinds)} layer_types for {layers} layers")
    if unknown := set(kinds) - {"chunked_attention", "full_attention"}:
        raise ConfigError(
            f"layer type {unknown.pop()!r} is not supported, only chunked_attention and full_attention"
        )
    if "chunked_attention" in kinds and chunk is None:
        raise ConfigError("layer_types has chunked_attention, but attention_chunk_size is not set")
    has_norm = raw.get("use_qk_norm", True)
    entry = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if has_norm and (entry.get("rope_type") or entry.get("type")) == "yarn":
        raise NotOurs("YaRN's attention temperature, which the norm of q and k removes, is not supported")
    growth = raw.get("attn_scale", 0.1) if raw.get("attn_temperature_tuning", True) else 0
    if growth < 0:
        raise NotOurs(f"attn_scale {growth} is negative")
    sparse = raw.get("moe_layers")
    if sparse is None:
        step = raw.get("interleave_moe_layer_step", 1)
        sparse = range(step - 1, layers, step)
    return {
        "intermediate_size": raw.get("intermediate_size_mlp", 16384),
        "head_dim": _head_dim(raw, 128),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "mlp_bias": False,
        "qk_norm": "unweighted" if has_norm else None,
        "rope_theta": 5e5,
        "is_interleaved": True,
        "positions": raw.get("max_position_embeddings", 131072),
        "unrotated_layers": _unrotated(rotates),
        "temperature": {
            "beta": growth,
            "original_max_position_embeddings": raw.get("floor_scale", 8192),
            "counts_from_one": True,
            "in_float32": True,
        }
        if growth
        else None,
        "has_rotated_temperature": False,
        "chunk_size": chunk,
        "chunked_layers": tuple(index for index, kind in enumerate(kinds) if kind == "chunked_attention"),
        "experts": {
            "routing": {
                "num_experts": raw.get("num_local_experts", 16),
                "experts_per_token": raw.get("num_experts_per_tok", 1),
                "scores": "sigmoid",
                "scales_inputs": True,
            },
            "inner": inner,
            "is_sparse": tuple(index in sparse for index in range(layers)),
            "mlp": "feed_forward.",
            "names": ExpertNames(
                or_stacked=("gate_up_proj", "down_proj"), is_transposed=True, router="router"
            ),
            "shared_size": inner,
            "shared": "shared_expert",
        },
    }


def _smollm3(raw: RawConfig) -> dict[str, Any]:
    rotates, window = _rotating(raw), raw.get("sliding_window")
    # `use_sliding_window` only says which layers have a window where `layer_types` does not.
    has_windows = flag(raw, "use_sliding_window") and window is not None
    return {
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "rope_theta": 2e6,
        "positions": raw.get("max_position_embeddings", 32768),
        "unrotated_layers": _unrotated(rotates),
        "sliding_windows": sliding_windows_of(raw, window, lambda index: has_windows and not rotates[index]),
    }


def _helium(raw: RawConfig) -> dict[str, Any]:
    return {
        "head_dim": _head_dim(raw, 128),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-8),
        "output_bias": False,
        "rope_theta": 1e5,
        "is_interleaved": True,
        "positions": raw.get("max_position_embeddings", 4096),
    }


def _olmo2(raw: RawConfig) -> dict[str, Any]:
    return {"rms_norm_eps": raw.get("rms_norm_eps", 1e-5), "qk_norm": "width", "norms": "outputs"}


def _olmo3(raw: RawConfig) -> dict[str, Any]:
    theta, positions = raw.get("rope_theta") or 5e5, raw.get("max_position_embeddings", 2048)
    entries = raw.get("rope_parameters") or {}
    if not entries.keys() <= {"full_attention", "sliding_attention"}:
        raise NotOurs("its rope_parameters are not by layer type")
    scaled = {**(entries.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = entries.get("sliding_attention") or {}
    return {
        **_olmo2(raw),
        "rope": rope_fields(scaled, theta=theta, max_position_embeddings=positions),
        "local_rope": rope_fields(local, theta=theta, max_position_embeddings=positions),
        "sliding_windows": sliding_windows_of(
            raw, raw.get("sliding_window", 4096), lambda index: (index + 1) % 4
        ),
    }


def _olmoe(raw: RawConfig) -> dict[str, Any]:
    if raw.get("clip_qkv") is not None:
        raise NotOurs("clip_qkv is not supported")
    return {
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "qk_norm": "width",
        "positions": raw.get("max_position_embeddings", 4096),
        "experts": {
            "routing": {
                "num_experts": raw.get("num_experts", 64),
                "experts_per_token": raw.get("num_experts_per_tok", 8),
                "normalises": raw.get("norm_topk_prob", False),
            },
            "inner": raw.get("intermediate_size"),
            "is_sparse": _all(raw, True),
        },
    }


def _seed_oss(raw: RawConfig) -> dict[str, Any]:
    return {
        "head_dim": _head_dim(raw, 128),
        "attention_bias": flag(raw, "attention_bias", True),
        "output_bias": flag(raw, "attention_out_bias"),
        "positions": raw.get("max_position_embeddings", 524288),
    }


def _ernie4_5(raw: RawConfig) -> dict[str, Any]:
    has_bias = flag(raw, "use_bias")
    return {
        "head_dim": _head_dim(raw, 128),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "rope_theta": 5e5,
        "is_interleaved": True,
        "positions": raw.get("max_position_embeddings", 131072),
    }


def _ernie4_5_moe(raw: RawConfig) -> dict[str, Any]:
    if flag(raw, "use_bias"):
        raise NotOurs("use_bias, with which its output head has a bias, is not supported")
    if (least := raw.get("moe_norm_min", 1e-12)) != 1e-12:
        raise NotOurs(f"moe_norm_min {least} is not 1e-12")
    layers, every = layer_count(raw), raw.get("moe_layer_interval", 1)
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    inner = raw.get("moe_intermediate_size", 1536)
    return {
        **_ernie4_5(raw),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "num_multi_token_layers": raw.get("num_nextn_predict_layers") or 0,
        "experts": {
            "routing": {
                "num_experts": raw.get("num_experts") or raw.get("moe_num_experts", 64),
                "experts_per_token": raw.get("num_experts_per_tok") or raw.get("moe_k", 6),
                "normalises": True,
                "has_correction": True,
            },
            "has_float32_router": True,
            "inner": inner,
            "is_sparse": tuple(
                (index + 1) % every == 0 and first <= index <= last for index in range(layers)
            ),
            "shared_size": times(inner, raw.get("moe_num_shared_experts", 2)),
            "names": ExpertNames(correction="moe_statics.e_score_correction_bias"),
        },
    }


def _glm4(raw: RawConfig) -> dict[str, Any]:
    is_vl = raw.get("model_type") == "glm4v_text"
    return {
        "head_dim": raw["hidden_size"] // raw["num_attention_heads"] if is_vl else raw.get("head_dim") or 128,
        "rms_norm_eps": raw.get("rms_norm_eps", 1.5625e-7),
        "attention_bias": flag(raw, "attention_bias", True),
        "output_bias": False,
        "mlp_bias": False,
        "has_fused_mlp": True,
        "norms": "both",
        "is_interleaved": True,
        "partial_rotary_factor": 1.0 if is_vl else 0.5,
        "positions": raw.get("max_position_embeddings", 131072),
    }


def _glm(raw: RawConfig) -> dict[str, Any]:
    return {**_glm4(raw), "norms": "inputs"}


def _deepseek_v3_routing(raw: RawConfig, normalises: bool) -> dict[str, Any]:
    """Return the routing of what DeepSeek-V3 began (arXiv 2412.19437)."""
    return {
        "num_experts": raw.get("n_routed_experts", 128),
        "experts_per_token": raw.get("num_experts_per_tok", 8),
        "scores": "sigmoid",
        "normalises": raw.get("norm_topk_prob", normalises),
        "scaling": raw.get("routed_scaling_factor", 1.0),
        "has_correction": True,
        "num_groups": 1 if (groups := raw.get("n_group")) is None else groups,
        "groups_per_token": 1 if (taken := raw.get("topk_group")) is None else taken,
    }


def _glm4_moe(raw: RawConfig) -> dict[str, Any]:
    inner = raw.get("moe_intermediate_size", 1408)
    return {
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": "head" if flag(raw, "use_qk_norm") else None,
        "partial_rotary_factor": 1.0 if raw.get("model_type") == "glm4v_moe_text" else 0.5,
        "positions": raw.get("max_position_embeddings", 131072),
        "num_multi_token_layers": raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 1,
        "experts": {
            "routing": _deepseek_v3_routing(raw, normalises=True),
            "has_float32_router": True,
            "inner": inner,
            "is_sparse": _first_dense(raw, raw.get("first_k_dense_replace", 1)),
            "shared_size": times(inner, raw.get("n_shared_experts", 1)),
        },
    }


def _solar_open(raw: RawConfig) -> dict[str, Any]:
    inner = raw.get("moe_intermediate_size", 1280)
    return {
        "intermediate_size": inner,  # no layer is dense, and its configs need not say one
        "head_dim": _head_dim(raw, 128),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "output_bias": False,
        "mlp_bias": False,
        "rope_theta": 1e6,
        "positions": raw.get("max_position_embeddings", 131072),
        "experts": {
            "routing": _deepseek_v3_routing(raw, normalises=True),
            "has_float32_router": True,
            "inner": inner,
            "is_sparse": _all(raw, True),
            "shared_size": times(inner, raw.get("n_shared_experts", 1)),
        },
    }


def _hy_v3(raw: RawConfig) -> dict[str, Any]:
    inner, counted = raw.get("moe_intermediate_size", 1536), raw.get("num_local_experts")
    return {
        "head_dim": _head_dim(raw, 128),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "qk_norm": "head",
        "rope_theta": 11158840.0,
        "positions": raw.get("max_position_embeddings", 131072),
        "num_multi_token_layers": raw.get("num_nextn_predict_layers") or 0,
        "experts": {
            "routing": {
                "num_experts": raw.get("num_experts", 192) if counted is None else counted,
                "experts_per_token": raw.get("num_experts_per_tok", 8),
                "scores": "sigmoid",
                "normalises": True,
                "scaling": raw.get("router_scaling_factor", 2.826),
                "has_correction": True,
            },
            "has_float32_router": True,
            "inner": inner,
            "is_sparse": sparse_by_type(raw),
            # With none transformers makes one of the size of a dense layer's MLP.
            "shared_size": times(inner, raw.get("num_shared_experts", 1)) or raw.get("intermediate_size"),
            "shared": "shared_mlp",
            "names": ExpertNames(router="router.gate", correction="expert_bias"),
        },
    }


def _dots1(raw: RawConfig) -> dict[str, Any]:
    window, first = raw.get("sliding_window", 4096), raw.get("max_window_layers", 62)
    inner = raw.get("moe_intermediate_size", 1408)
    return {
        "qk_norm": "head",
        "mlp_bias": False,
        "sliding_windows": sliding_windows_of(
            raw, window, lambda index: window is not None and index >= first
        ),
        "experts": {
            "routing": {
                **_deepseek_v3_routing(raw, normalises=False),
                "num_experts": raw.get("n_routed_experts"),
            },
            "has_float32_router": True,
            "inner": inner,
            "is_sparse": _first_dense(raw, raw.get("first_k_dense_replace", 0)),
            "shared_size": times(inner, raw.get("n_shared_experts") or 0),
        },
    }


def _exaone4(raw: RawConfig) -> dict[str, Any]:
    window, every = raw.get("sliding_window", 4096), raw.get("sliding_window_pattern", 4)
    if window is not None and raw.get("layer_types") is None:
        raise NotOurs(f"its sliding_window_pattern {every!r} comes without layer_types")
    windows = sliding_windows_of(raw, window)
    return {
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "qk_norm": "head",
        "norms": "outputs",
        "attention_bias": False,
        "mlp_bias": False,
        "unrotated_layers": ()
        if window is None
        else tuple(index for index, each in enumerate(windows) if each is None),
        "sliding_windows": windows,
    }


def _gpt_oss(raw: RawConfig) -> dict[str, Any]:
    alpha, limit = raw.get("swiglu_alpha", 1.702), raw.get("swiglu_limit", 7.0)
    if (alpha, limit) != (1.702, 7.0):
        raise NotOurs(f"swiglu_alpha {alpha} and swiglu_limit {limit} are not 1.702 and 7")
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raise NotOurs("it has no RoPE scaling")
    return {
        "head_dim": raw.get("head_dim") or 64,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
        "rope_theta": 150000.0,
        "attention_bias": flag(raw, "attention_bias", True),
        "has_sinks": True,
        "positions": raw.get("max_position_embeddings", 131072),
        "sliding_windows": sliding_windows_of(
            raw, raw.get("sliding_window", 128), lambda index: index % 2 == 0
        ),
        "experts": {
            "routing": {
                "num_experts": raw.get("num_local_experts", 128),
                "experts_per_token": raw.get("num_experts_per_tok", 4),
                "normalises": True,
            },
            "inner": raw.get("intermediate_size"),
            "is_sparse": _all(raw, True),
            "activation": "swigluoai",
            "has_router_bias": True,
            "names": ExpertNames(
                stacked=("gate_up_proj", "down_proj"),
                biases=("gate_up_proj_bias", "down_proj_bias"),
                is_transposed=True,
                is_interleaved=True,
                router="router",
            ),
        },
    }


DIFFERENCES: Mapping[str, Callable[[RawConfig], dict[str, Any]]] = {
    "Dots1ForCausalLM": _dots1,
    "Ernie4_5ForCausalLM": _ernie4_5,
    "Ernie4_5_MoeForCausalLM": _ernie4_5_moe,
    "Exaone4ForCausalLM": _exaone4,
    "Glm4ForCausalLM": _glm4,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GlmForCausalLM": _glm,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": _granite_moe,
    "HYV3ForCausalLM": _hy_v3,
    "HeliumForCausalLM": _helium,
    "Llama4ForCausalLM": _llama4,
    "LlamaForCausalLM": _llama,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "Ministral3ForCausalLM": _ministral3,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "OlmoeForCausalLM": _olmoe,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
    "SolarOpenForCausalLM": _solar_open,
}
"""By the architecture: fields of LlamaConfig; `positions`, the context that the config tells; and of RopeParameters
`is_interleaved`, and what holds for configs without `rope_theta` or, where a part of a head may be rotated, without
`partial_rotary_factor`."""
KV_HEADS = {
    f"{name}ForCausalLM": count
    for count, names in (
        (2, "Ernie4_5 Glm Glm4 Starcoder2"),
        (4, "Ernie4_5_Moe Qwen3Moe SmolLM3"),
        (8, "Glm4Moe GptOss HYV3 Llama4 MiniMaxM2 Ministral3 Mistral Mixtral SeedOss SolarOpen"),
        (16, "Qwen2Moe"),
        (20, "Helium"),
        (32, "Dots1 Exaone4 Qwen2 Qwen3 StableLm"),
    )
    for name in names.split()
}
"""Of configs without `num_key_value_heads`; of other architectures they have as many as query heads."""

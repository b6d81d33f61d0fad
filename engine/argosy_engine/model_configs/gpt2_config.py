"""The configs of decoders with LayerNorms and MLPs without a gate: GPT-2, OPT, XGLM, Falcon, BLOOM and MPT."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.llama_config import scaled_positions
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    PlainActivation,
    Positive,
    RawConfig,
    Size,
    flag,
    layer_count,
)
from argosy_engine.model_configs.rope_config import RopeParameters, shared_rope_fields


class PlainConfig(ModelConfig, frozen=True, kw_only=True):
    """LayerNorms, and an MLP without a gate."""

    intermediate_size: Size
    activation: PlainActivation
    layer_norm_eps: Positive = 1e-5
    norm_before: bool = True
    """Whether LayerNorm comes before each block, rather than after it (OPT-350m)."""
    has_bias: bool = True
    has_norm_bias: bool = True
    qkv_limit: Positive | None = None
    """Elements of q, k and v are clamped to at most this, and at least its negative (MPT)."""

    @property
    def is_grouped(self) -> bool:
        """Whether q, k and v are one tensor, in which each KV head's queries precede its key and its value."""
        return False

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP get the same hidden states."""
        return False


class GPT2Config(PlainConfig, frozen=True, kw_only=True):
    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

    scales_attention: bool
    """Whether scores are divided by sqrt(head_dim)."""
    scales_attention_by_layer: bool
    """Whether scores are also divided by the layer's number, counted from 1."""

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        scale = self.head_dim**-0.5 if self.scales_attention else 1.0
        return tuple(
            replace(layer, scale=scale / (index + 1) if self.scales_attention_by_layer else scale)
            for index, layer in enumerate(super().attention_layers)
        )

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if raw.get("add_cross_attention"):
            raise ConfigError("cross-attention is not supported")
        layers, hidden, heads = layer_count(raw, "n_layer"), raw["n_embd"], raw["n_head"]
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": raw.get("n_inner") or 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": raw.get("n_positions", 1024),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": (None,) * layers,
            "activation": raw.get("activation_function", "gelu_new"),
            "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
            "scales_attention": raw.get("scale_attn_weights", True),
            "scales_attention_by_layer": raw.get("scale_attn_by_inverse_layer_idx", False),
        }


class OPTConfig(PlainConfig, frozen=True, kw_only=True):
    """arXiv 2205.01068."""

    embedding_size: Size
    """Width of the token embedding. Where it differs from hidden_size (OPT-350m), it is projected there and back."""
    has_final_norm: bool

    @property
    def pooled_size(self) -> int:
        return self.embedding_size

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if not raw.get("layer_norm_elementwise_affine", True):
            raise ConfigError("layer norms without weights are not supported")
        layers, hidden, heads = layer_count(raw), raw["hidden_size"], raw["num_attention_heads"]
        norm_before = raw.get("do_layer_norm_before", True)
        return {
            "vocab_size": raw.get("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": raw.get("ffn_dim"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": raw.get("max_position_embeddings", 2048),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "sliding_windows": (None,) * layers,
            "activation": raw.get("activation_function", "relu"),
            "embedding_size": raw.get("word_embed_proj_dim") or hidden,
            "norm_before": norm_before,
            "has_final_norm": norm_before and not raw.get("_remove_final_layer_norm", False),
            "has_bias": raw.get("enable_bias", True),
        }


class XGLMConfig(PlainConfig, frozen=True, kw_only=True):
    """arXiv 2112.10668. Positions are sines and cosines that are computed."""

    embedding_multiplier: Positive
    zero_position: int | None
    """Row of the table of positions that has zeros."""

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if raw.get("add_cross_attention"):
            raise ConfigError("cross-attention is not supported")
        fields = _sizes(raw, ("num_layers", 24), ("d_model", 1024), ("attention_heads", 16))
        return {
            **fields,
            "vocab_size": raw.get("vocab_size", 256008),
            "intermediate_size": raw.get("ffn_dim", 4096),
            "max_position_embeddings": raw.get("max_position_embeddings", 2048),
            "tie_word_embeddings": raw.get("tie_word_embeddings", True),
            "activation": raw.get("activation_function", "gelu"),
            "embedding_multiplier": math.sqrt(fields["hidden_size"])
            if flag(raw, "scale_embedding", True)
            else 1.0,
            "zero_position": raw.get("pad_token_id", 1),
        }


def _sizes(
    raw: RawConfig, layers: tuple[str, int], hidden: tuple[str, int], heads: tuple[str, int]
) -> dict[str, Any]:
    """Return the sizes of hidden states and heads.

    Args:
        layers, hidden, heads: name in transformers' config class, and default. The names of its attribute map win.
    """

    def value(names: tuple[str, ...], default: int) -> Any:
        return next((found for name in names if (found := raw.get(name)) is not None), default)

    count = layer_count({layers[0]: value(("num_hidden_layers", layers[0]), layers[1])}, layers[0])
    width = value(("n_embed", "hidden_size", hidden[0]), hidden[1])
    num_heads = value(("num_attention_heads", heads[0]), heads[1])
    if width < 4 or num_heads < 1 or width % num_heads:
        raise ConfigError(f"hidden_size {width} is less than 4, or no multiple of {num_heads} heads")
    return {
        "hidden_size": width,
        "num_hidden_layers": count,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": width // num_heads,
        "sliding_windows": (None,) * count,
    }


class FalconConfig(PlainConfig, frozen=True, kw_only=True):
    """Falcon (arXiv 2311.16867), BLOOM (arXiv 2211.05100) and MPT."""

    rope: RopeParameters | None = None
    alibi: Literal["bloom", "mpt"] | None = None
    """Whose slopes the scores' biases have (`alibi_slopes`); None: there are none."""
    softmax_scale: Positive | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    norms: Literal["sequential", "one", "two"] = "sequential"
    """Whether the MLP gets what attention adds to, or attention and MLP the same, after one norm or one each."""
    is_mpt: bool = False
    has_embedding_norm: bool = False

    @property
    def is_grouped(self) -> bool:
        return not self.is_mpt

    @property
    def is_parallel(self) -> bool:
        return self.norms != "sequential"

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        scale = self.softmax_scale or self.head_dim**-0.5
        return tuple(
            replace(layer, scale=scale, has_alibi=self.alibi is not None)
            for layer in super().attention_layers
        )

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """How much a score of each head falls per token of distance. Where heads are no power of two, both families
        take some of the slopes of a number that is one, in an order of their own."""
        count = self.num_attention_heads
        if self.alibi is None:
            return ()
        if self.alibi == "mpt":
            power = 1 << (count - 1).bit_length()
            slopes = [2.0 ** (-8 * index / power) for index in range(1, power + 1)]
            return tuple(slopes if power == count else [*slopes[1::2], *slopes[::2]][:count])
        power = 1 << (count.bit_length() - 1)
        more = [2.0 ** (-8 * index / (2 * power)) for index in range(1, 2 * (count - power), 2)]
        return (*(2.0 ** (-8 * index / power) for index in range(1, power + 1)), *more)

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        return {"FalconForCausalLM": _falcon, "BloomForCausalLM": _bloom, "MptForCausalLM": _mpt}[
            raw["architectures"][0]
        ](raw)


def _falcon(raw: RawConfig) -> dict[str, Any]:
    if flag(raw, "alibi"):
        raise ConfigError(
            "alibi is not supported for Falcon: transformers rounds its biases to bfloat16 and, without SDPA, adds "
            "them twice, so nothing tells which tokens are right"
        )
    fields = _sizes(raw, ("num_hidden_layers", 32), ("hidden_size", 4544), ("num_attention_heads", 71))
    heads = fields["num_attention_heads"]
    kv_heads = raw.get("num_kv_heads") or heads
    is_new, is_multi_query = flag(raw, "new_decoder_architecture"), flag(raw, "multi_query", True)
    is_parallel, num_norms = flag(raw, "parallel_attn", True), raw.get("num_ln_in_parallel_attn")
    if is_new:
        num_norms = 2 if num_norms is None else num_norms
    elif is_multi_query:
        kv_heads = 1
    elif kv_heads != heads:
        raise ConfigError(
            f"num_kv_heads {kv_heads} is not num_attention_heads {heads}, and multi_query is false"
        )
    if (is_new and not is_parallel) or num_norms not in ((1, 2) if is_new else (None, 1)):
        raise ConfigError(
            f"num_ln_in_parallel_attn {num_norms} and parallel_attn {is_parallel} with new_decoder_architecture "
            f"{is_new} are not those of any Falcon"
        )
    positions = raw.get("max_position_embeddings", 2048)
    rope = shared_rope_fields(raw, max_position_embeddings=positions)
    return {
        **fields,
        "vocab_size": raw.get("vocab_size", 65024),
        "num_key_value_heads": kv_heads,
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * fields["hidden_size"],
        "max_position_embeddings": scaled_positions(rope, positions),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "activation": raw.get("activation", "gelu"),
        "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "has_bias": flag(raw, "bias"),
        "rope": rope,
        "norms": "sequential" if not is_parallel else "two" if num_norms == 2 else "one",
    }


def _bloom(raw: RawConfig) -> dict[str, Any]:
    if flag(raw, "apply_residual_connection_post_layernorm"):
        raise ConfigError("apply_residual_connection_post_layernorm is not supported")
    fields = _sizes(raw, ("n_layer", 2), ("hidden_size", 64), ("n_head", 8))
    return {
        **fields,
        "vocab_size": raw.get("vocab_size", 250880),
        "intermediate_size": 4 * fields["hidden_size"],
        "max_position_embeddings": raw.get("seq_length") or 2048,
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "activation": "gelu_new",
        "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "alibi": "bloom",
        "has_embedding_norm": True,
    }


def _mpt(raw: RawConfig) -> dict[str, Any]:
    attention = raw.get("attn_config") or {}
    asked = {
        "attn_type": attention.get("attn_type", "multihead_attention") != "multihead_attention",
        "prefix_lm": attention.get("prefix_lm"),
        "rope": attention.get("rope"),
        "sliding_window_size": attention.get("sliding_window_size", -1) not in (None, -1),
        "qk_ln": attention.get("qk_ln"),
        "alibi": not attention.get("alibi", True),
        "alibi_bias_max": attention.get("alibi_bias_max", 8) != 8,  # which transformers does not read
        "expansion_ratio": raw.get("expansion_ratio", 4) != 4,
        "logit_scale": raw.get("logit_scale") is not None,
        "no_bias": not raw.get("no_bias", True),
    }
    if any(asked.values()):
        names = ", ".join(name for name, is_asked in asked.items() if is_asked)
        raise ConfigError(f"MPT with another {names} than MPT-7B's is not supported")
    fields = _sizes(raw, ("n_layers", 24), ("d_model", 2048), ("n_heads", 16))
    return {
        **fields,
        "vocab_size": raw.get("vocab_size", 50368),
        "intermediate_size": 4 * fields["hidden_size"],
        "max_position_embeddings": raw.get("max_seq_len", 2048),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "activation": "gelu",
        "layer_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
        "has_bias": False,
        "has_norm_bias": False,
        "qkv_limit": attention.get("clip_qkv") or None,
        "softmax_scale": attention.get("softmax_scale"),
        "alibi": "mpt",
        "is_mpt": True,
    }

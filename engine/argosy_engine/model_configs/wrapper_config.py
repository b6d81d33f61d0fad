"""Wrapper config: of a model with parts for images, video or sound (…ForConditionalGeneration) the text part is served.

Owns which text parts our own decoders compute, with their fields as config.json would have them, and what the text
part's tensors are called without the wrapper. Text parts that are not ours run on transformers' code
(`models.transformers_classes`). No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import RawConfig
from argosy_engine.model_configs.quantization_config import QuantizationConfig

WRAPPER = "ForConditionalGeneration"
"""End of the names of wrappers, and of encoders with decoders, which are not served."""
NATIVE_WRAPPERS = frozenset(
    f"{name}{WRAPPER}"
    for name in (
        *("Gemma3", "Gemma4", "Glm4v", "Glm4vMoe", "Idefics3", "InternVL", "Llama4", "Llava", "LlavaNext"),
        *(
            "LlavaOnevision",
            "Mistral3",
            "Qwen2VL",
            "Qwen2_5_VL",
            "Qwen3VL",
            "Qwen3VLMoe",
            "Qwen3_5",
            "Qwen3_5Moe",
            "SmolVLM",
        ),
    )
)
"""Wrappers that give texts to a decoder and an output head and do nothing else with them. Tests hold each against
transformers."""
_NATIVE_TEXTS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",  # whose M-RoPE is RoPE where all are texts
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Our architectures, by the text part's model_type."""
_OUTER = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id")
"""Fields that either of the two configs may have."""
READ_OF_WRAPPERS = frozenset({*_OUTER, "text_config", "tie_word_embeddings"})
"""Fields of a wrapper's config that are read, unless it has those of the text part beside them (Qwen2.5-VL)."""
_PARTS = re.compile(r"(?!quantization|compression|generation)\w+_config")
_OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|image_newline|multi_modal_projector|connector|audio_tower|embed_vision"
    r"|embed_audio)(\.|$)"
)
_MULTI_TOKEN = re.compile(r"(model\.)?mtp\.")
"""Tensors that predict further tokens."""
_PREFIXES = (
    (re.compile(r"(model\.)?language_model\.lm_head(?=\.|$)"), "lm_head"),
    (re.compile(r"(language_model\.model|model\.(language_model|text_model))(?=\.|$)"), "model"),
)
_Value = TypeVar("_Value")


def is_wrapper(raw: RawConfig, architecture: str) -> bool:
    """Whether a config is a wrapper's, rather than that of an encoder with a decoder."""
    return architecture.endswith(WRAPPER) and any(
        isinstance(value, Mapping) and _PARTS.fullmatch(name) for name, value in raw.items()
    )


def either(raw: RawConfig, name: str) -> Any:
    """Return a field of the wrapper's config, or else of its text part's."""
    value = raw.get(name)
    text = raw.get("text_config")
    return text.get(name) if value is None and isinstance(text, Mapping) else value


def with_outer_fields(raw: RawConfig) -> dict[str, Any]:
    """Return a wrapper's config with the fields that only its text part has."""
    return {**raw, **{name: value for name in _OUTER if (value := either(raw, name)) is not None}}


def native_text_part(raw: RawConfig, config: Any) -> dict[str, Any] | None:
    """Return the text part's config.json, `architectures` included; None if it is not one of ours, or the wrapper is
    not that of the config's model type.

    Args:
        config: transformers' config object, which knows the defaults of both.
    """
    wrapper = raw["architectures"][0].removesuffix(WRAPPER)
    if wrapper.replace("_", "").lower() != config.model_type.replace("_", ""):
        return None  # and its text part may be no config
    text = config.get_text_config()
    architecture = _NATIVE_TEXTS.get(text.model_type)
    fields = text.to_dict()
    is_gemma4 = text.model_type == "gemma4_text"
    if architecture is None or (fields.get("final_logit_softcapping") is not None and not is_gemma4):
        return None
    if is_gemma4:
        fields["placeholder_token_ids"] = [
            token_id
            for kind in ("image", "video", "audio")
            if (token_id := getattr(config, f"{kind}_token_id", None)) is not None
        ]
    if text.model_type == "mistral":
        fields.pop("layer_types", None)  # by which transformers tells Ministral 8B, but not in a wrapper
    outer = with_outer_fields(raw)
    return {
        **fields,
        **{name: outer[name] for name in _OUTER if name in outer},
        "architectures": [architecture],
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
    }


def text_name(name: str) -> str | None:
    """Return what a tensor, or a module, of a wrapper is called in its text part; None if it belongs to another part.

    Names that are neither stay as they are, so that what a checkpoint has besides is found.
    """
    if _OTHER_PARTS.match(name) or _MULTI_TOKEN.match(name):
        return None
    for pattern, prefix in _PREFIXES:
        if found := pattern.match(name):
            return prefix + name[found.end() :]
    return name


def is_of_other_part(name: str) -> bool:
    """Whether a tensor of a wrapper is one of its parts for images, video or sound."""
    return _OTHER_PARTS.match(name) is not None


def text_tensors(tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the tensors of a wrapper's text part, by their names without the wrapper.

    Raises:
        ConfigError: two have the same name.
    """
    found: dict[str, _Value] = {}
    for name, value in tensors.items():
        if (own := text_name(name)) is None:
            continue
        if own in found:
            raise ConfigError(f"the checkpoint has {own} twice, under two names; copy it again")
        found[own] = value
    return found


def encoder_elements(elements: Mapping[str, int]) -> int:
    """Return the number of elements of a wrapper's tensors that belong to its encoder of images.

    Args:
        elements: of each tensor of the checkpoint, by its name there.
    """
    return sum(count for name, count in elements.items() if _OTHER_PARTS.match(name))


def without_parts(tensors: Mapping[str, _Value], parts: Iterable[str]) -> dict[str, _Value]:
    """Return a wrapper's tensors without those of parts that are not served.

    Args:
        parts: names of modules in transformers' model; checkpoints may lack `model.` before them.
    """
    ends = [re.escape(part.removeprefix("model.")) for part in parts]
    other = re.compile(rf"(model\.)?({'|'.join(['mtp', *ends])})\.")
    return {name: value for name, value in tensors.items() if not other.match(name)}


def text_quantization(found: QuantizationConfig | None) -> QuantizationConfig | None:
    """Return the quantisation with the names of the text part's layers."""
    if found is None:
        return None
    return found.renamed(text_name)

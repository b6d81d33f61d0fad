"""VisionSpec: the part of a wrapper's config on which its encoder of images, and the place of what that gives, depend.
No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from argosy_engine.errors import ConfigError

SEEING_WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Gemma3", "Glm4v", "Glm4vMoe", "Idefics3", "InternVL", "Llama4", "Llava", "LlavaNext"),
        *("LlavaOnevision", "Mistral3"),
        *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM"),
    )
)
"""Wrappers whose images are served: those that put the encoder's outputs in the place of a token's embeddings. Tests
hold each against transformers."""
SEEING_BY_TRANSFORMERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Aria", "AyaVision", "Cohere2Vision", "DeepseekVL", "GotOcr2", "Ovis2")
)
"""Those whose decoder is transformers' as well."""
_SECTIONS = {
    **dict.fromkeys(("glm4v", "glm4v_moe"), (8, 12, 12)),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (16, 24, 24)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (11, 11, 10)),
}
"""Transformers' default of `mrope_section`, of the model types with M-RoPE."""
_INTERLEAVED_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


class VisionSpec(Struct, frozen=True, kw_only=True):
    """How a model sees images."""

    fields: str
    """The wrapper's config.json with the overrides and without what describes quantised weights, as JSON."""
    image_token_id: Annotated[int, Meta(ge=0, le=1 << 24)]
    """The token whose embeddings the encoder's outputs replace."""
    mrope_section: Annotated[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], Meta(max_length=3)] = ()
    """Of M-RoPE (arXiv 2409.12191), how many pairs of a head turn by frame, row and column; empty: it has RoPE."""
    is_mrope_interleaved: bool = False
    """Whether these pairs alternate (Qwen3-VL), instead of following each other."""
    is_bidirectional: bool = False
    """Whether the tokens of an image attend to all of it (Gemma 3), so that it is computed in one step."""
    num_deepstack: Annotated[int, Meta(ge=0, le=64)] = 0
    """Number of first layers to whose outputs features of the encoder's own layers are added (DeepStack, arXiv
    2406.04334)."""

    def axes(self, num_pairs: int) -> list[int] | None:
        """Return for each pair of a head that is rotated which of a token's coordinates (frame, row, column) turns it;
        None: the model has RoPE.

        Raises:
            ConfigError: the sections are of another number of pairs.
        """
        if not self.mrope_section:
            return None
        if sum(self.mrope_section) != num_pairs or len(self.mrope_section) != 3:
            raise ConfigError(f"mrope_section {list(self.mrope_section)} is not of {num_pairs} pairs")
        if not self.is_mrope_interleaved:
            return [axis for axis, count in enumerate(self.mrope_section) for _ in range(count)]
        return [
            pair % 3 if pair % 3 and pair < 3 * self.mrope_section[pair % 3] else 0
            for pair in range(num_pairs)
        ]


def vision_spec(fields: Mapping[str, Any], config: Any) -> VisionSpec:
    """Return how a wrapper among `SEEING_WRAPPERS` sees images.

    Args:
        fields: its config.json without what describes quantised weights.
        config: transformers' config object of it.

    Raises:
        ConfigError: a field is malformed.
    """
    image_token = getattr(config, "image_token_id", None)
    if image_token is None:
        image_token = getattr(config, "image_token_index", None)
    vocab_size = config.get_text_config().vocab_size
    if not isinstance(image_token, int) or not 0 <= image_token < vocab_size:
        raise ConfigError(f"image_token_id {image_token!r} is no token of a vocabulary of {vocab_size}")
    section: tuple[int, ...] = ()
    if config.model_type in _SECTIONS:
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        section = tuple(rope.get("mrope_section", _SECTIONS[config.model_type]))
        if len(section) != 3 or not all(isinstance(each, int) and each >= 0 for each in section):
            raise ConfigError(f"mrope_section {list(section)} is not three numbers of pairs")
    layers = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    return VisionSpec(
        fields=json.dumps(fields, sort_keys=True),
        image_token_id=image_token,
        mrope_section=section,
        is_mrope_interleaved=config.model_type in _INTERLEAVED_TYPES,
        is_bidirectional=config.model_type == "gemma3",
        num_deepstack=len(layers),
    )

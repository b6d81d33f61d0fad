"""VisionSpec: the part of a wrapper's config on which its encoder of images, and the place of what that gives, depend;
and LargestImage: the largest that its processor makes. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil, isqrt, prod
from typing import Annotated, Any, Final

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

MAX_RESULT_BYTES: Final = 256 << 20
"""Tensors of one image. Those of 16,000 tokens of Qwen2.5-VL have 300 MB, of Qwen3-VL 400 MB."""
_MAX_CROPS = {"internvl": 12, "aya_vision": 12, "cohere2_vision": 12, "llama4": 16, "ovis2": 9}
"""Transformers' default of `max_patches`, the crops that a processor divides an image into, by model type."""
_MAX_ARIA_CROPS = 8
_MAX_PIXELS = 12_845_056
"""Transformers' default for Qwen's models."""


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


class LargestImage(Struct, frozen=True, kw_only=True):
    """The largest image that a processor makes, as the encoder gets it."""

    pixels: tuple[int, ...]
    """Shape of `pixel_values`."""
    integers: dict[str, list[list[int]]] = {}
    """Its other inputs."""
    masks: dict[str, tuple[int, ...]] = {}
    """Shapes of those that are true for all of it."""
    num_patches: int
    """That the encoder computes."""
    num_values: int
    """Of a patch, at the most at a time."""
    num_precise: int
    """Of a patch in float32, besides."""
    has_mask: bool = False
    """Whether each patch has a value for each other one."""

    def activation_bytes(self, itemsize: int) -> int:
        """Estimate the peak activation bytes of encoding it.

        Args:
            itemsize: bytes per element of the model's dtype.
        """
        values = self.num_values + (self.num_patches if self.has_mask else 0)
        per_patch = values * itemsize + self.num_precise * 4
        return self.num_patches * per_patch + prod(self.pixels) * (4 + itemsize)


def largest_image(
    config: Any,
    processor: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    max_tokens: int,
    *,
    trusts_request_kwargs: bool = False,
) -> LargestImage:
    """Return the largest image of a wrapper among `SEEING_WRAPPERS` and `SEEING_BY_TRANSFORMERS`.

    Args:
        config: transformers' config object of it.
        processor: preprocessor_config.json; empty: transformers' defaults.
        kwargs: `--mm-processor-kwargs`.
        max_tokens: of a prompt.
        trusts_request_kwargs: whether requests say how large images become, up to the bounds of all images.
    """
    vision, kind = config.vision_config, config.model_type
    asked = {**processor, **kwargs}
    size = {**_mapping(processor.get("size")), **_mapping(kwargs.get("size"))}
    patch = _side(vision.patch_size)
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or getattr(vision, "mlp_dim", None)
    inner = inner or int(getattr(vision, "mlp_ratio", None) or 4) * hidden
    num_deepstack = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    outputs = config.get_text_config().hidden_size * (4 + num_deepstack) // 4  # at most one for four patches
    values = 10 * hidden + 4 * inner + outputs
    if getattr(vision, "temporal_patch_size", None):
        merge, row = vision.spatial_merge_size, 3 * vision.temporal_patch_size * patch**2
        most = min(max_tokens, MAX_RESULT_BYTES // (4 * row * merge**2))
        pixels = (
            kwargs.get("max_pixels") or size.get("longest_edge") or asked.get("max_pixels") or _MAX_PIXELS
        )
        if not trusts_request_kwargs:
            most = min(most, int(pixels) // (patch * merge) ** 2)
        rows = max(isqrt(most), 1)
        columns = max(most // rows, 1)
        count = rows * columns * merge**2
        return LargestImage(
            pixels=(count, row),
            integers={"image_grid_thw": [[1, rows * merge, columns * merge]]},
            num_patches=count,
            num_values=values,
            num_precise=2 * hidden,
        )
    side = _side(vision.image_size)
    if kind == "mistral3":
        unit = patch * config.spatial_merge_size
        longest = side if trusts_request_kwargs else min(int(size.get("longest_edge") or side), side)
        units = max(min(longest // unit, isqrt(max_tokens)), 1)
        return LargestImage(
            pixels=(1, 3, units * unit, units * unit),
            integers={"image_sizes": [[units * unit, units * unit]]},
            num_patches=(units * config.spatial_merge_size) ** 2,
            num_values=values,
            num_precise=2 * hidden,
            has_mask=True,
        )
    integers: dict[str, list[list[int]]] = {}
    if kind in ("llava_next", "llava_onevision"):
        height, width = max(config.image_grid_pinpoints, key=prod)
        integers = {"image_sizes": [[int(height), int(width)]]}
        crops = (height // side) * (width // side) + 1
    elif kind in ("idefics3", "smolvlm"):
        cut = _mapping(asked.get("max_image_size")).get("longest_edge") or side
        crops = ceil((size.get("longest_edge") or 4 * cut) / cut) ** 2 + 1
        crops = crops if asked.get("do_image_splitting", True) else 1
    else:
        crops = int(asked.get("max_patches") or _MAX_CROPS.get(kind, 0)) + 1
        crops = crops if asked.get("crop_to_patches", True) else 1
        if asked.get("do_pan_and_scan"):  # Gemma 3
            crops = int(asked.get("pan_and_scan_max_num_crops") or 4) + 1
        elif asked.get("split_image"):  # Aria
            crops = _MAX_ARIA_CROPS + 1
    bound = max(MAX_RESULT_BYTES // (4 * 3 * side**2), 1)
    if not integers:
        crops = bound if trusts_request_kwargs else min(crops, bound)
    shape = (crops, 3, side, side)
    has_batch = bool(integers) or kind in ("idefics3", "smolvlm")
    masks: dict[str, tuple[int, ...]] = {}
    if kind in ("idefics3", "smolvlm"):
        masks = {"pixel_attention_mask": (1, crops, side, side)}
    elif kind == "aria":
        masks = {"pixel_mask": (crops, side, side)}
    return LargestImage(
        pixels=(1, *shape) if has_batch else shape,
        integers=integers,
        masks=masks,
        num_patches=crops * (side // patch) ** 2,
        num_values=values,
        num_precise=2 * hidden,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _side(value: Any) -> int:
    """Return a size that a config states once, or by height and width."""
    return int(value[0] if isinstance(value, (list, tuple)) else value)

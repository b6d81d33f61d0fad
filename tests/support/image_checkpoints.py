"""Images for tiny random wrappers, as their processors would give them, and what prompts with them become."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.messages import EngineCoreRequest, MediaTensor, MultimodalFeature
from argosy_engine.params import SamplingParams

_GRIDS = (
    "glm4v",
    "glm4v_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
)


class Image(NamedTuple):
    """One image: what transformers' model is given of it."""

    name: str
    inputs: dict[str, torch.Tensor]
    grid: tuple[int, ...]


def random_image(model: Any, name: str, seed: int, rows: int = 4, columns: int = 6) -> Image:
    """Return an image of random pixels.

    Args:
        model: transformers' wrapper.
        rows, columns: patches, of models that take images of any size.
    """
    config = model.config
    vision = config.vision_config
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    kind, size = config.model_type, getattr(vision, "image_size", 28)
    size = size[0] if isinstance(size, (list, tuple)) else size
    if kind in _GRIDS:
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        merge = vision.spatial_merge_size
        grid = torch.tensor([[1, rows, columns]])
        inputs = {"pixel_values": pixels(rows * columns, width), "image_grid_thw": grid}
        return Image(name, inputs, (1, rows // merge, columns // merge))
    if kind == "mistral3":
        unit = vision.patch_size * config.spatial_merge_size
        height, width = unit, 2 * unit
        sizes = torch.tensor([[height, width]])
        return Image(name, {"pixel_values": pixels(1, 3, height, width), "image_sizes": sizes}, ())
    if kind in ("llava_next", "llava_onevision"):
        inputs = {
            "pixel_values": pixels(1, 3, 3, size, size),
            "image_sizes": torch.tensor([[size, 2 * size]]),
        }
        return Image(name, inputs, ())
    if kind in ("idefics3", "smolvlm"):
        mask = torch.ones(1, 2, size, size, dtype=torch.bool)
        return Image(name, {"pixel_values": pixels(1, 2, 3, size, size), "pixel_attention_mask": mask}, ())
    return Image(name, {"pixel_values": pixels(1, 3, size, size)}, ())


def num_embeds(model: Any, image: Image) -> int:
    """Return how many placeholders an image has."""
    base = model.base_model if hasattr(model.base_model, "get_image_features") else model
    output = base.get_image_features(**image.inputs, return_dict=True)
    if model.config.model_type == "llama4":
        return int(output.last_hidden_state.flatten(0, -2).shape[0])
    features = output.pooler_output
    if isinstance(features, torch.Tensor):
        return int(features.flatten(0, -2).shape[0])
    return sum(int(each.flatten(0, -2).shape[0]) for each in features)


def prompt_of(model: Any, parts: Sequence[list[int] | Image]) -> tuple[list[int], list[MultimodalFeature]]:
    """Return the tokens of a prompt of texts and images, and its features."""
    token = model.config.image_token_id
    tokens: list[int] = []
    features = []
    for part in parts:
        if not isinstance(part, Image):
            tokens += part
            continue
        count = num_embeds(model, part)
        stored = {name: stored_tensor(value) for name, value in part.inputs.items()}
        features.append(MultimodalFeature("image", part.name, len(tokens), count, count, part.grid, stored))
        tokens += [token] * count
    return tokens, features


def stored_tensor(value: torch.Tensor) -> MediaTensor:
    dtype: Any = str(value.dtype).removeprefix("torch.")
    return MediaTensor(dtype, tuple(value.shape), value.contiguous().numpy().tobytes())


@torch.inference_mode()
def reference_tokens(model: Any, parts: Sequence[list[int] | Image], count: int) -> list[int]:
    """Return the greedy tokens of transformers' model, which computes the whole prompt anew for each; none of them is
    the placeholder of images, for which it would want another image."""
    tokens, features = prompt_of(model, parts)
    images = [part for part in parts if isinstance(part, Image)]
    given: dict[str, torch.Tensor] = {}
    for name in images[0].inputs if images else ():
        dim = 1 if model.config.model_type in ("idefics3", "smolvlm") else 0
        given[name] = torch.cat([each.inputs[name] for each in images], dim=dim)
    found = list(tokens)
    for _ in range(count):
        ids = torch.tensor([found])
        more = dict(given)
        if model.config.model_type in (*_GRIDS, "gemma3"):
            types = torch.zeros_like(ids)
            for feature in features:
                types[0, feature.offset : feature.offset + feature.length] = 1
            if images:
                more["token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"] = types
        if hasattr(model.base_model, "rope_deltas"):
            model.base_model.rope_deltas = None
        if model.config.model_type == "llama4":  # in transformers 5.24 the whole model fails
            more = {"inputs_embeds": _llama4_embeddings(model, ids, images)}
            logits = model.language_model(use_cache=False, **more).logits[0, -1]
        else:
            logits = model(input_ids=ids, use_cache=False, **more).logits[0, -1]
        logits[model.config.image_token_id] = -torch.inf
        found.append(int(logits.argmax()))
    return found[len(tokens) :]


def _llama4_embeddings(model: Any, ids: torch.Tensor, images: Sequence[Image]) -> torch.Tensor:
    embeddings = model.get_input_embeddings()(ids)
    mask = (ids == model.config.image_token_id).unsqueeze(-1)
    for_images = [
        model.multi_modal_projector(model.get_image_features(**each.inputs).last_hidden_state.flatten(0, -2))
        for each in images
    ]
    return embeddings.masked_scatter(mask, torch.cat(for_images)) if images else embeddings


def requests_of(
    model: Any, prompts: Sequence[Sequence[list[int] | Image]], count: int, first: int = 0
) -> Iterator[EngineCoreRequest]:
    bias = {model.config.image_token_id: -100.0}
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logit_bias=bias)
    for index, parts in enumerate(prompts, first):
        tokens, features = prompt_of(model, parts)
        yield EngineCoreRequest(str(index), tokens, sampling, time.time(), mm_features=features)


def generated(client: InprocClient, requests: Sequence[EngineCoreRequest]) -> list[list[int]]:
    """Return the tokens of requests that are computed together."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        client.add_request(request)
    while client.has_work:
        for output in client.step().outputs:
            assert output.error is None, output.error
            outputs[output.request_id] += output.new_token_ids
    return list(outputs.values())

"""KV cache tensors: the groups of a model's layers, and each layer's view of the shared storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy_engine.attention.params import AttentionParams
from argosy_engine.messages.kv_cache_interface import KVCacheGroup, group_layers, groups_of_layers
from argosy_engine.models.registry import CausalLM
from argosy_engine.native.allocation import allocate


def layer_groups(model: CausalLM, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Group the model's layers by what each says that it keeps."""
    return group_layers([layer.kv_cache_spec(block_size) for layer in model.attention_layers])


def stage_groups(
    model: CausalLM, block_size: int, layers: Sequence[AttentionParams], own: range
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of all layers of a pipeline, with those of one stage (`groups_of_layers`).

    Args:
        model: this stage's.
        layers: of all stages, on one tensor-parallel rank.
        own: indices of this stage's layers.
    """
    itemsize = model.attention_layers[0].kv_cache_dtype.itemsize
    groups = group_layers([layer.kv_cache_spec(block_size, itemsize) for layer in layers])
    return groups_of_layers(groups, own)


def bind_kv_cache(
    model: CausalLM, groups: Sequence[KVCacheGroup], num_blocks: int, block_size: int, device: torch.device
) -> None:
    """Allocate the pool and give each layer its view of it, [2, num_blocks, block_size, num_kv_heads, head_dim].

    The i-th layers of all groups view the same bytes, because a block belongs to one group at a time. On a CPU the
    memory is not committed until it is used.
    """
    (page_bytes,) = {group.spec.page_bytes for group in groups}
    shape = max(len(group.layers) for group in groups), num_blocks * page_bytes
    if device.type == "cpu":
        storage = allocate(shape, torch.uint8)
    else:
        storage = torch.zeros(shape, dtype=torch.uint8, device=device)
    layers = model.attention_layers
    for index, group in enumerate(groups):
        for pages, layer in zip(storage, (layers[each] for each in group.layers), strict=False):
            view = pages.view(layer.kv_cache_dtype).view(layer.kv_cache_shape(num_blocks, block_size))
            layer.bind(view, index)

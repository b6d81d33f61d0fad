"""KV cache tensors: the groups of a model's layers, and each layer's view of the shared storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy_engine.attention.layer import Attention, StateLayer
from argosy_engine.attention.params import LayerParams
from argosy_engine.messages.kv_cache_interface import (
    KVCacheGroup,
    attention_groups,
    block_bytes,
    group_layers,
    groups_of_layers,
)
from argosy_engine.models.registry import CausalLM
from argosy_engine.native.allocation import allocate


def layer_groups(model: CausalLM, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Group the model's layers by what each says that it keeps."""
    attention = [layer.kv_cache_spec(block_size) for layer in model.attention_layers]
    return group_layers([*attention, *(layer.kv_cache_spec() for layer in state_layers(model))])


def state_layers(model: CausalLM) -> Sequence[StateLayer]:
    """Return the layers that keep a state per request; most models have none."""
    layers: Sequence[StateLayer] = getattr(model, "state_layers", ())
    return layers


def stage_groups(
    model: CausalLM, block_size: int, layers: Sequence[LayerParams], own: range
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of all layers of a pipeline, with those of one stage (`groups_of_layers`).

    Args:
        model: this stage's.
        layers: of all stages, on one tensor-parallel rank.
        own: indices of this stage's layers.
    """
    if state_layers(model) or not layers:  # one stage
        return layer_groups(model, block_size)
    itemsize = model.attention_layers[0].kv_cache_dtype.itemsize
    groups = group_layers([layer.kv_cache_spec(block_size, itemsize) for layer in layers])
    return groups_of_layers(groups, own)


def bind_kv_cache(
    model: CausalLM,
    groups: Sequence[KVCacheGroup],
    num_blocks: int,
    block_size: int,
    device: torch.device,
    num_states: int = 0,
) -> None:
    """Allocate the pool and give each layer its view of it, in the shape that it asks for (`kv_cache_shape`).

    The i-th layers of all groups view the same bytes, because a block belongs to one group at a time. If groups differ
    in the size of a page, a block's bytes are in one place, and the layers' views are strided. On a CPU the memory is
    not committed until it is used. Layers with states get tensors of their own, for `num_states` blocks.
    """
    for state in state_layers(model):
        shapes = [((num_states, *shape), dtype) for shape, dtype in state.tensors]
        state.bind([_zeros(*each, device) for each in shapes], block_size, len(groups) - 1)
    attention = attention_groups(groups)
    if not attention:
        return
    layers = model.attention_layers
    page_bytes, *others = {group.spec.page_bytes for group in attention}
    if others:
        storage = _zeros((num_blocks, block_bytes(attention)), torch.uint8, device)
        for index, group in enumerate(attention):
            for place, layer in enumerate(layers[each] for each in group.layers):
                pages = storage[:, place * group.spec.page_bytes : (place + 1) * group.spec.page_bytes]
                _, *shape = layer.kv_cache_shape(num_blocks, block_size)
                assert isinstance(layer, Attention)
                view = pages.view(layer.kv_cache_dtype).unflatten(1, (2, *shape[1:]))
                layer.bind(view.transpose(0, 1), index)
        return
    whole = max(len(group.layers) for group in attention), num_blocks * page_bytes
    storage = _zeros(whole, torch.uint8, device)
    for index, group in enumerate(attention):
        for pages, layer in zip(storage, (layers[each] for each in group.layers), strict=False):
            view = pages.view(layer.kv_cache_dtype).view(layer.kv_cache_shape(num_blocks, block_size))
            layer.bind(view, index)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return allocate(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

"""KV cache tensors: the groups of a model's layers, and each layer's view of the shared storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy_engine.attention.kv_cache_spec import (
    KVCacheGroup,
    attention_groups,
    block_bytes,
    group_layers,
)
from argosy_engine.attention.layer import Attention, StateLayer
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
    if not any(group.layers for group in attention):
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

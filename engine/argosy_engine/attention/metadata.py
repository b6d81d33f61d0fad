"""AttentionMetadata: request, position and KV cache slot of each token in a step's flattened batch. Built once per step
for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """Metadata of a batch flattened to T tokens of R requests, decodes (one new token) first.

    `positions` is int64 [T], `slot_mapping` int64 [T] (block * block_size + offset), `block_tables` int64
    [R, max_blocks]. Per request, `query_lens` counts the new tokens and `seq_lens` all tokens after this step.
    """

    num_decodes: int
    query_lens: list[int]
    seq_lens: list[int]
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    decode_seq_lens: torch.Tensor
    """int64 [num_decodes], the decodes' `seq_lens` on the device."""
    layers: tuple[AttentionMetadata, ...] = ()
    """Metadata of each layer, if the layers belong to several KV cache groups, which differ only in slots and block
    tables. Empty otherwise."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """What a backend has derived from this metadata, for the layers after the first."""

    def of_layer(self, index: int) -> AttentionMetadata:
        return self.layers[index] if self.layers else self

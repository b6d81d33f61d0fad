"""AttentionMetadata: request, position and KV cache slot of each token in a step's flattened batch. Built once per step
for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from argosy_engine.attention.native_step import NativeStep


@dataclass(slots=True)
class AttentionMetadata:
    """Metadata of a batch flattened to T tokens of R requests, decodes (one new token) first.

    `slot_mapping` is int64 [T] (block * block_size + offset), `block_tables` int64 [R, max_blocks]. Per request,
    `query_lens` counts the new tokens and `seq_lens` all tokens after this step.
    """

    num_decodes: int
    query_lens: list[int]
    seq_lens: list[int]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    decode_seq_lens: torch.Tensor
    """int64 [num_decodes], the decodes' `seq_lens` on the device."""
    layers: tuple[AttentionMetadata, ...] = ()
    """Metadata of each layer, if the layers belong to several KV cache groups, which differ only in slots and block
    tables. Empty otherwise."""
    native_step: NativeStep | None = None
    """This metadata in the form that the CPU kernels read, created by the first layer that uses them."""

    def of_layer(self, index: int) -> AttentionMetadata:
        return self.layers[index] if self.layers else self

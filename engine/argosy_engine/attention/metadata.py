"""AttentionMetadata: where each token of a step's flattened batch belongs. Built once per step, for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from argosy_engine.attention.native_step import NativeStep


@dataclass(slots=True)
class AttentionMetadata:
    """The batch is flattened to T tokens of R requests; requests with one new token come first.

    Shapes: `slot_mapping` int64 [T] (block * block_size + offset); `block_tables` int64 [R, max_blocks];
    `query_lens`, `seq_lens` per request (new tokens; all tokens after this step), as Python ints and tensors.
    """

    num_decodes: int
    query_lens: list[int]
    seq_lens: list[int]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    decode_seq_lens: torch.Tensor
    """int64 [num_decodes]"""
    layers: tuple[AttentionMetadata, ...] = ()
    """of each layer, where they belong to several KV cache groups; these differ in slots and block tables only"""
    native_step: NativeStep | None = None
    """the same for the CPU kernels, once the first layer that uses them has made it"""

    def of_layer(self, index: int) -> AttentionMetadata:
        return self.layers[index] if self.layers else self

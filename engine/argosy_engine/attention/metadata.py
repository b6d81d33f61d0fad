"""ModelInputs: what the forward pass of a step reads. AttentionMetadata: request, position and KV cache slot of each
token in its flattened batch.

Metadata is built once per step and KV cache group. What kernels read are tensors on the device; names and dtypes are
vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Metadata of a batch flattened to T tokens of R requests, decodes (one new token) first."""

    num_decodes: int
    query_start_loc: torch.Tensor
    """int32 [R + 1]: index of each request's first token, and T."""
    seq_lens: torch.Tensor
    """int32 [R]: each request's number of tokens after this step."""
    positions: torch.Tensor
    """int64 [T]: each token's position in its sequence."""
    slot_mapping: torch.Tensor
    """int64 [T]: where each token's key and value go, block * block_size + offset."""
    block_table: torch.Tensor
    """int32 [R, max_blocks]: each request's blocks, in token order."""
    query_start_loc_cpu: NDArray[np.int32]
    """`query_start_loc` on the host; on a CPU the same memory."""
    seq_lens_cpu: NDArray[np.int32]
    """`seq_lens` on the host; on a CPU the same memory."""
    groups: tuple[AttentionMetadata, ...] = ()
    """Metadata of each KV cache group, if there are several. They differ only in slots and block tables. Empty
    otherwise."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """What a backend has derived from this metadata, for the layers after the first."""

    @property
    def max_query_len(self) -> int:
        """The most new tokens of a request, found once for all layers."""
        found: int | None = self.shared.get("max_query_len")
        if found is None:
            has_prompts = self.num_decodes < len(self.seq_lens_cpu)
            found = int(np.diff(self.query_start_loc_cpu).max()) if has_prompts else 1
            self.shared["max_query_len"] = found
        return found

    def forget(self) -> None:
        """Drop what has been derived: it is derived again, from what the tensors then hold."""
        for each in (self, *self.groups):
            each.shared.clear()

    def of_group(self, index: int) -> AttentionMetadata:
        """Return the metadata of a KV cache group, for its layers."""
        return self.groups[index] if self.groups else self


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """A step's flattened batch of T tokens, as a model reads it."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]; for M-RoPE [3, T]."""
    meta: AttentionMetadata
    hidden: torch.Tensor | None = None
    """[T, hidden_size], instead of the tokens' embeddings: what the previous stage of a pipeline has returned. May be
    changed in place. None: the model embeds the tokens."""
    token_types: torch.Tensor | None = None
    """int64 [T]: 1 for tokens of a pair's second text, of encoders that tell them apart. None: all are 0."""

"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): its weights, and what computes it.

A token's key of head h is W_UK[h] c beside its rotated key, and its value is W_UV[h] c, where c is the token's latent:
the norm of what `kv_a_proj_with_mqa` makes of it. Only c and the rotated key are kept. Attention takes one of two forms
that give the same result:

- absorbed: q^T (W_UK c) is (W_UK^T q)^T c, so queries are brought to the latents, all heads attend to the same vectors,
  and W_UV is applied to what comes out. For decodes, which read as little memory as there is to read.
- expanded: keys and values of every head are computed, and it is attention as usual. For prompts, in which it takes
  fewer operations (`LatentAttentionParams.expands`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.rotary import RotaryEmbedding

_FEW_ROWS = 3
"""Up to as many rows, W x^T in float32 takes a CPU half as long as x W^T."""


class LatentWeights(NamedTuple):
    """What one layer's latent attention has besides its constants."""

    rotary: RotaryEmbedding
    """Tables of `qk_rope_head_dim` elements."""
    norm: torch.Tensor
    """Weight [kv_lora_rank] of the RMSNorm of latents."""
    eps: float
    """Of this norm."""
    key_up: torch.Tensor
    """[num_heads, kv_lora_rank, qk_nope_head_dim], contiguous: W_UK of each head, transposed."""
    value_up: torch.Tensor
    """[num_heads, v_head_dim, kv_lora_rank], contiguous: W_UV of each head."""

    @classmethod
    def of_kv_b(
        cls,
        kv_b: torch.Tensor,
        qk_nope_head_dim: int,
        rotary: RotaryEmbedding,
        norm: torch.Tensor,
        eps: float,
    ) -> LatentWeights:
        """Make them of the weight of `kv_b_proj`, [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]."""
        keys, values = kv_b[:, :qk_nope_head_dim], kv_b[:, qk_nope_head_dim:]
        return cls(rotary, norm, eps, keys.transpose(1, 2).contiguous(), values.contiguous())


class LatentAttentionImpl(Protocol):
    """One layer's latent attention by one backend."""

    def __call__(
        self, q: torch.Tensor, compressed: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        """See `layer.LatentAttention.__call__`."""
        ...


def multiply_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T of each head, [T, num_heads, out], any strides with contiguous heads.

    Args:
        x: [T, num_heads, in], with contiguous heads.
        weight: [num_heads, out, in].
    """
    if len(x) <= _FEW_ROWS and x.dtype is torch.float32 and x.device.type == "cpu":
        return torch.bmm(weight, x.permute(1, 2, 0)).permute(2, 0, 1).contiguous()
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

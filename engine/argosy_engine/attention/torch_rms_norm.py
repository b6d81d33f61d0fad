"""RMSNorm in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / rms(x) * weight over the last dimension, in float32 (arXiv 1910.07467); the result has x's dtype.

    A weight in float32 is applied before the result is rounded to x's dtype (Gemma), another one after it (Llama).
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype is torch.float32:
        return (wide * weight).to(x.dtype)
    return wide.to(x.dtype) * weight

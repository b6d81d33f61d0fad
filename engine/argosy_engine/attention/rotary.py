"""RotaryEmbedding: the tables of rotary position embedding (arXiv 2104.09864), and their use in plain torch."""

from __future__ import annotations

import torch


class RotaryEmbedding:
    """Rotary position embedding that rotates halves, the layout of Llama checkpoints.

    Args:
        inv_freq: float32 on the CPU, of at most head_dim / 2 pairs, see `layers.rope.inverse_frequencies`; the pairs
            after them are not rotated.

    The tables are always computed on the CPU. Weights are planned on the meta device, and torch's arithmetic there
    first imports torch's compiler, which takes longer than the rest of a small model's load.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        attention_scaling: float = 1.0,
        head_dim: int | None = None,
    ) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        cosines, sines = angles.cos() * attention_scaling, angles.sin() * attention_scaling
        if head_dim is not None and (fixed := head_dim // 2 - len(inv_freq)):
            cosines = torch.cat((cosines, cosines.new_ones(max_positions, fixed)), dim=1)
            sines = torch.cat((sines, sines.new_zeros(max_positions, fixed)), dim=1)
        self._dtype = dtype
        self.cosines = cosines.to(device)
        """float32 [max_positions, head_dim / 2]"""
        self.sines = sines.to(device)

    def select(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for positions [T], each [T, 1, head_dim]. Called once per step for all layers."""
        cos, sin = self.cosines[positions].to(self._dtype), self.sines[positions].to(self._dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((sin, sin), dim=-1).unsqueeze(1)

    @staticmethod
    def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, head_dim]."""
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + rotated * sin

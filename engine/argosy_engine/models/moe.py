"""SparseMLP: a router sends every token to its k best experts, each a gated MLP (arXiv 2101.03961, 1701.06538)."""

from __future__ import annotations

import torch

from argosy_engine.models.decoder import GatedMLP
from argosy_engine.models.weights import Weights


class SparseMLP:
    """
    Args:
        inner: width of one expert.
        normalises: the k weights of a token are scaled to sum to 1.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        num_experts: int,
        experts_per_token: int,
        normalises: bool,
    ) -> None:
        self.router = weights.linear({prefix + "gate": num_experts}, hidden)
        self.experts = [
            GatedMLP(weights, f"{prefix}experts.{index}.", hidden, inner, bias=False)
            for index in range(num_experts)
        ]
        self.experts_per_token = experts_per_token
        self.normalises = normalises

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> the same shape."""
        chosen = torch.softmax(self.router(x).float(), dim=-1).topk(self.experts_per_token, dim=-1)
        weights, experts = chosen.values, chosen.indices
        if self.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Sorted by expert, each expert's tokens are one run: one matrix product per expert that is hit.
        order = experts.flatten().argsort(stable=True)
        rows = order // self.experts_per_token
        weights = weights.flatten()[order].to(x.dtype).unsqueeze(1)
        out = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(
            torch.bincount(experts.flatten(), minlength=len(self.experts)).tolist()
        ):
            if count:
                run = slice(start, start + count)
                out.index_add_(0, rows[run], self.experts[expert](x[rows[run]]) * weights[run])
                start += count
        return out

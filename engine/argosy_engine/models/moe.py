"""SparseMLP: a mixture of experts. A router sends every token to its k best experts, each a gated MLP
(arXiv 1701.06538, 2101.03961)."""

from __future__ import annotations

import torch

from argosy_engine.models.layer_factory import LayerFactory
from argosy_engine.models.llama import GatedMLP


class SparseMLP:
    """Sparse mixture-of-experts MLP.

    Args:
        inner: intermediate size of one expert.
        normalises: whether to scale a token's k weights to sum to 1.
    """

    def __init__(
        self,
        factory: LayerFactory,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        num_experts: int,
        experts_per_token: int,
        normalises: bool,
    ) -> None:
        self.router = factory.linear({prefix + "gate": num_experts}, hidden)
        self.experts = [
            GatedMLP(factory, f"{prefix}experts.{index}.", hidden, inner, bias=False)
            for index in range(num_experts)
        ]
        self.experts_per_token = experts_per_token
        self.normalises = normalises

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the experts on x [T, hidden_size]; the output has the same shape."""
        chosen = torch.softmax(self.router(x).float(), dim=-1).topk(self.experts_per_token, dim=-1)
        weights, experts = chosen.values, chosen.indices
        if self.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Sorting by expert makes each expert's tokens contiguous, so each active expert runs once.
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

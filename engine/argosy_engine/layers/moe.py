"""SparseMLP: a mixture of experts. A router sends every token to its k best experts, each a gated MLP
(arXiv 1701.06538, 2101.03961)."""

from __future__ import annotations

import torch

from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.quantized_rows import Activations, RowQuantization


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
        self.input_quantization: RowQuantization | None = None  # a router's weights keep their precision
        self.router = factory.linear({prefix + "gate": num_experts}, hidden, keeps_precision=True)
        self.experts = factory.experts(
            ExpertsSpec(
                prefix=prefix + "experts.",
                num_experts=num_experts,
                hidden=hidden,
                inner=inner,
                experts_per_token=experts_per_token,
                normalises=normalises,
            )
        )
        self.sum_ranks = factory.sum_ranks
        self.exchange = factory.exchange
        if self.exchange is not None:
            self.exchange.add_layer(self, hidden, factory.dtype, factory.device)

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Run the experts on x [T, hidden_size]; the output has the same shape. For slot_mapping see `Experts`."""
        assert isinstance(x, torch.Tensor)
        if self.exchange is None:
            return self.sum_ranks(self.experts(x, self.router(x), slot_mapping))
        tokens, slots = self.exchange.gather(x, slot_mapping)
        mixed = self.exchange.scatter(self.experts(tokens, self.router(tokens), slots))
        return self.sum_ranks(mixed)[: len(x)]

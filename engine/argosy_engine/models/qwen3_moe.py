"""Qwen3-MoE (arXiv 2505.09388): Qwen3's decoder with sparse MLPs in most layers."""

from __future__ import annotations

from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.moe import SparseMLP
from argosy_engine.model_configs.llama_config import Qwen3MoeConfig
from argosy_engine.models.llama import MLP, Llama


class Qwen3Moe(Llama):
    config: Qwen3MoeConfig

    def make_mlp(self, factory: LayerFactory, prefix: str, index: int) -> MLP:
        config = self.config
        if not config.is_sparse(index):
            return super().make_mlp(factory, prefix, index)
        return SparseMLP(
            factory,
            prefix,
            config.hidden_size,
            config.moe_intermediate_size,
            num_experts=config.num_experts,
            experts_per_token=config.num_experts_per_tok,
            normalises=config.norm_topk_prob,
        )

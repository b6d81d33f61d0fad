"""Nemotron-H (arXiv 2504.03624) and Nemotron 3 (2512.20848). A layer is one block after an RMSNorm: a Mamba-2 layer,
attention without positions, an MLP with squared ReLUs, or a mixture of such MLPs."""

from __future__ import annotations

from typing import ClassVar

import torch

from argosy_engine.attention.layer import Attention, StateLayer
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import SquaredReluMLP, decoder_mlp
from argosy_engine.model_configs.mamba_config import MambaHybridConfig
from argosy_engine.models.decoder import MLP, Decoder
from argosy_engine.models.llama import LlamaAttention
from argosy_engine.models.mamba_hybrid import MambaMixer


class NemotronHLayer:
    """One block after an RMSNorm.

    Args:
        prefix: of the layer's tensors.
    """

    def __init__(
        self,
        config: MambaHybridConfig,
        factory: LayerFactory,
        prefix: str,
        block: LlamaAttention | MambaMixer | MLP,
    ) -> None:
        self.block = block
        self.norm = factory.input_norm(prefix + "norm", config.hidden_size, config.rms_norm_eps, feeds=block)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`."""
        if residual is None:
            residual, normed = x, self.norm(x)
        else:
            normed = self.norm.after_adding(x, residual)
        if isinstance(self.block, (LlamaAttention, MambaMixer)):
            return self.block(normed, meta), residual
        return self.block(normed, meta.slot_mapping), residual

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


class NemotronH(Decoder[NemotronHLayer]):
    """See `Decoder`."""

    checkpoint_prefix: ClassVar[str] = "backbone."

    def __init__(self, config: MambaHybridConfig, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(
            config,
            factory,
            config.rms_norm_eps,
            embedding="backbone.embeddings",
            final_norm="backbone.norm_f",
        )

    def make_layers(self, factory: LayerFactory) -> list[NemotronHLayer]:
        config = self.config
        attention = dict(zip(config.layers_with_attention, config.attention_layers, strict=True))
        layers = []
        for index in factory.own_indices(config.num_hidden_layers):
            kind = config.layer_types[index]
            prefix = f"backbone.layers.{index}."
            block: LlamaAttention | MambaMixer | MLP
            if kind == "linear_attention":
                block = MambaMixer(config, factory, prefix + "mixer.")
            elif kind == "full_attention":
                block = LlamaAttention(config, factory, prefix + "mixer.", index, attention[index], None)
            else:
                block = self._mlp(factory, prefix, index)
            layers.append(NemotronHLayer(config, factory, prefix, block))
        return layers

    def _mlp(self, factory: LayerFactory, prefix: str, index: int) -> MLP:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        if config.layer_types[index] == "mlp":
            return SquaredReluMLP(factory, prefix + "mixer.", hidden, inner, bias=config.mlp_bias)
        return decoder_mlp(factory, prefix, index, hidden, inner, config.experts, bias=config.mlp_bias)

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.block.attention for layer in self.layers if isinstance(layer.block, LlamaAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of each Mamba layer."""
        return [layer.block.mamba.state for layer in self.layers if isinstance(layer.block, MambaMixer)]

"""Decoder: what Llama, DeepSeek, Qwen3-Next, LFM2 and hybrids with Mamba have in common, and the layers of those whose
mixers differ.

A layer gets and gives a pair of tensors whose sum is the hidden states: the sum is left to the next norm, which reads
both anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.quantized_rows import Activations, TakesRows


class MLP(TakesRows, Protocol):
    """An MLP of any kind."""

    def __call__(self, x: Activations, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Map x [T, hidden_size] to its shape. slot_mapping [T] tells padding."""
        ...


class Mixer(TakesRows, Protocol):
    """Attention of any kind with its projections, or what stands in its place."""

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Map x [T, hidden_size] to its shape."""
        ...


class Layer(Protocol):
    """A layer of a `Decoder`."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on x + residual, both [T, hidden_size]; return the output as such a pair. The residual is
        updated in place."""
        ...

    def parts_to_compile(self) -> list[CompilablePart]:
        """See `CompilableLayer`."""
        ...


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


MixerT = TypeVar("MixerT", bound=Mixer)
LayerT = TypeVar("LayerT", bound=Layer)


class MixerLayer(Generic[MixerT]):
    """A mixer and an MLP, each after an RMSNorm.

    Args:
        prefix: of the layer's tensors.
        adds_one: whether the norms multiply by 1 + weight.
        norms: names of the norms of what the mixer and the MLP get.
        multiplier: factor on what both add to the residual.
    """

    def __init__(
        self,
        config: ModelConfig,
        factory: LayerFactory,
        prefix: str,
        eps: float,
        mixer: MixerT,
        mlp: MLP,
        *,
        adds_one: bool = False,
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
        multiplier: float = 1.0,
    ) -> None:
        hidden = config.hidden_size
        self.mixer, self.mlp = mixer, mlp
        self.multiplier = multiplier
        first, second = norms
        self.input_norm = factory.input_norm(prefix + first, hidden, eps, feeds=mixer, adds_one=adds_one)
        self.post_norm = factory.input_norm(prefix + second, hidden, eps, feeds=mlp, adds_one=adds_one)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layer`."""
        if residual is None:
            residual, normed = x, self.input_norm(x)
        else:
            normed = self.input_norm.after_adding(x, residual)
        mixed = self._scaled(self.mixer(normed, meta))
        mapped = self.mlp(self.post_norm.after_adding(mixed, residual), meta.slot_mapping)
        return self._scaled(mapped), residual

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.multiplier == 1.0 else x * self.multiplier

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


class Decoder(ABC, Generic[LayerT]):
    """Embedding, layers, final norm and output head.

    Args:
        eps: of the final norm.
        adds_one: whether it multiplies by 1 + weight.
        embedding, final_norm: names of the embedding and of that norm.
        embedding_multiplier: factor on the embeddings.
        logits_scaling: logits are divided by it.
    """

    checkpoint_prefix: ClassVar[str] = "model."
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def __init__(
        self,
        config: ModelConfig,
        factory: LayerFactory,
        eps: float,
        *,
        adds_one: bool = False,
        embedding: str = "model.embed_tokens",
        final_norm: str = "model.norm",
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
    ) -> None:
        self.embedding_multiplier, self.logits_scaling = embedding_multiplier, logits_scaling
        vocab_size, hidden, is_tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        before = factory.before_layers(is_tied=is_tied)
        self.embedding = before.embedding(embedding + ".weight", vocab_size, hidden)
        self.layers = self.make_layers(factory)
        after = factory.after_layers()
        self._eps, self._adds_one, self._hidden, self._final_norm = eps, adds_one, hidden, final_norm
        self.norm = self.make_norm(after)
        self.lm_head = after.output_head(self.embedding, vocab_size, is_tied=is_tied)

    @abstractmethod
    def make_layers(self, factory: LayerFactory) -> list[LayerT]:
        """Make the layers of this pipeline stage."""

    def make_norm(self, factory: LayerFactory) -> Norm:
        """Make the final norm."""
        return factory.rms_norm(self._final_norm, self._hidden, self._eps, adds_one=self._adds_one)

    def embed(self, inputs: ModelInputs) -> torch.Tensor:
        """Return what the first of these layers gets, [T, hidden_size]."""
        if inputs.hidden is not None:
            return inputs.hidden
        embedded = self.embedding(inputs.token_ids)
        return embedded if self.embedding_multiplier == 1.0 else embedded * self.embedding_multiplier

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size]; see `CausalLM.forward`."""
        x, residual = self.embed(inputs), None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs.meta)
        return x if residual is None else residual.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to hidden [R, hidden_size]."""
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] of hidden [R, hidden_size]. Pass only the rows to sample."""
        logits = self.lm_head.logits(self.norm(hidden))
        return logits if self.logits_scaling == 1.0 else logits / self.logits_scaling

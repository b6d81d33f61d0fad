"""Decoder: what all families have in common, and the layers of those that differ in what mixes their tokens.
PooledModel: a decoder that is served for pooling, without its output head, and with the head of its labels if it
classifies.

A layer gets and gives a pair of tensors whose sum is the hidden states: the sum is left to the next norm, which reads
both anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionLayer, AttentionMetadata, ModelInputs, StateLayer
from argosy_engine.checkpoint.stored_tensors import SCORE
from argosy_engine.layers.embedding import Embedding
from argosy_engine.layers.layer_compiler import CompilableLayer, CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.model_use import PoolingSpec
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.models import registry
from argosy_engine.models.registry import CausalLM
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer on x + residual, both [T, hidden_size]; return the output as such a pair. The residual is
        updated in place. None: x is all."""
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
        embedding_width: of the embedding; None: hidden_size.
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
        embedding_width: int | None = None,
        final_norm: str = "model.norm",
        embedding_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
    ) -> None:
        self.embedding_multiplier, self.logits_scaling = embedding_multiplier, logits_scaling
        vocab_size, hidden, is_tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        before = factory.before_layers(is_tied=is_tied)
        self.embedding = before.embedding(embedding + ".weight", vocab_size, embedding_width or hidden)
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
        x = self.embed(inputs)
        residual: torch.Tensor | None = None
        deepstack = inputs.deepstack
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, inputs.meta)
            if deepstack is not None and index < len(deepstack.features):
                x.index_add_(0, deepstack.rows, deepstack.features[index])
        return x if residual is None else residual.add_(x)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to hidden [R, hidden_size]."""
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, vocab_size] of hidden [R, hidden_size]. Pass only the rows to sample."""
        logits = self.lm_head.logits(self.norm(hidden))
        return logits if self.logits_scaling == 1.0 else logits / self.logits_scaling


class ScoringModel(CausalLM, Protocol):
    """A model that may classify."""

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, num_labels] of vectors [R, pooled_size], both float32, before any activation."""
        ...


class PooledModel:
    """A model whose config says that it pools. The head of its labels is computed in float32, as vLLM does, by every
    tensor-parallel rank as a whole."""

    checkpoint_prefix: ClassVar[str] = ""  # the decoder's counts
    ignored_tensors: ClassVar[Sequence[str]] = ()

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        spec = config.pooling
        assert spec is not None
        self._decoder = decoder = registry.model_class(config.architecture)(config, factory)
        self._head: torch.Tensor | None = None
        """float32 [num_labels, pooled_size]"""
        after = factory.after_layers()
        if spec.task == "embed":
            return
        if spec.label_token_ids:
            self._head = _rows_of_output_head(decoder, config, after, spec)
        else:
            self._head = after.take(SCORE, spec.num_labels, config.pooled_size).float()

    @property
    def layers(self) -> Sequence[CompilableLayer]:
        return self._decoder.layers

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self._decoder.attention_layers

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The states of layers that keep any."""
        layers: Sequence[StateLayer] = getattr(self._decoder, "state_layers", ())
        return layers

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states; see `CausalLM.forward`."""
        return self._decoder.forward(inputs)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.last_hidden_state(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a pooling model has no output head")

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, num_labels] of vectors [R, pooled_size], both float32, before any activation."""
        assert self._head is not None, "embeddings have no scores"
        return F.linear(vectors, self._head)


def _rows_of_output_head(
    decoder: CausalLM, config: ModelConfig, factory: LayerFactory, spec: PoolingSpec
) -> torch.Tensor:
    """Return the output head's rows of the labels' tokens or, for two answers, their difference."""
    ids = spec.label_token_ids
    if config.tie_word_embeddings:
        embedding = cast(Embedding, decoder.embedding)  # type: ignore[attr-defined]  # of every family
        rows = embedding(torch.tensor(ids, device=embedding.weight.device))
    else:
        shard = Shard(0, tuple(range(id_, id_ + 1) for id_ in ids))
        rows = factory.weights.take("lm_head.weight", config.vocab_size, config.hidden_size, shard=shard)
    rows = rows.float()
    return rows[1:] - rows[:1] if spec.is_two_way else rows

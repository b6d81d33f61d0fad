"""PooledModel: a decoder that is served for pooling, without its output head, and with the head of its labels if it
classifies.

The head is computed in float32, as vLLM does, by every tensor-parallel rank as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, cast

import torch
import torch.nn.functional as F

from argosy_engine.attention.layer import AttentionLayer, StateLayer
from argosy_engine.attention.metadata import ModelInputs
from argosy_engine.checkpoint.stored_tensors import SCORE
from argosy_engine.layers.embedding import Embedding
from argosy_engine.layers.layer_compiler import CompilableLayer
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.pooling_spec import PoolingSpec
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.models import registry
from argosy_engine.models.registry import CausalLM


class ScoringModel(CausalLM, Protocol):
    """A model that may classify."""

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, num_labels] of vectors [R, pooled_size], both float32, before any activation."""
        ...


class PooledModel:
    """A model whose config says that it pools."""

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

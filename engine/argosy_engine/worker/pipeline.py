"""Pipeline: passes hidden states from the stage before to this one, and on to the stage after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.distributed.communicator import Communicator
from argosy_engine.models.registry import CausalLM


class Pipeline:
    """Runs one stage of a model. Every stage is given the same steps in the same order.

    Args:
        model: the layers of this stage.
        communicator: of the ranks that hold the stages, in their order.
        hidden_size: width of the states that stages exchange, in the model's dtype.
    """

    def __init__(
        self, model: CausalLM, communicator: Communicator, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._hidden_size, self._dtype = hidden_size, dtype
        self.is_last = communicator.rank == communicator.size - 1
        """Whether this stage samples."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: Sequence[torch.Tensor],
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Compute the stage's hidden states [T, hidden_size]; arguments: `CausalLM.forward`."""
        group = self._communicator
        hidden = None
        if group.rank:
            shape = len(token_ids), self._hidden_size
            hidden = group.receive(
                torch.empty(shape, dtype=self._dtype, device=token_ids.device), group.rank - 1
            )
        hidden = self._model.forward(token_ids, positions, kv_cache, meta, hidden)
        if not self.is_last:
            group.send(hidden, group.rank + 1)
        return hidden

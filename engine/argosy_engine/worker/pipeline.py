"""Pipeline: passes hidden states from the stage before to this one, and on to the stage after.

What arrives is written to one buffer, so that a CUDA graph of a stage's layers finds it where it was captured. The
exchange is no part of a graph.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from argosy_engine.attention.metadata import ModelInputs
from argosy_engine.distributed.communicator import Communicator
from argosy_engine.models.registry import CausalLM


class Pipeline:
    """Runs one stage of a model. Every stage is given the same steps in the same order.

    Args:
        model: the layers of this stage.
        communicator: of the ranks that hold the stages, in their order.
        hidden_size: width of the states that stages exchange, in the model's dtype.
        max_num_tokens: most tokens of a step.
    """

    def __init__(
        self,
        model: CausalLM,
        communicator: Communicator,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_tokens: int,
    ) -> None:
        self._model = model
        self._communicator = communicator
        self.is_last = communicator.rank == communicator.size - 1
        """Whether this stage samples."""
        self._received: torch.Tensor | None = None
        """[max_num_tokens, hidden_size], changed by the layers. Rows of padding keep what was there, from zeros on."""
        if communicator.rank:
            self._received = torch.zeros(max_num_tokens, hidden_size, dtype=dtype, device=device)

    def receive(self, num_tokens: int) -> None:
        """Receive what the stage before has computed of a step of `num_tokens`."""
        if self._received is not None:
            self._communicator.receive(self._received[:num_tokens], self._communicator.rank - 1)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute the stage's hidden states [T, hidden_size] from what it has received, valid until the next `receive`.

        Argument: `CausalLM.forward`.
        """
        if self._received is not None:
            inputs = replace(inputs, hidden=self._received[: len(inputs.token_ids)])
        return self._model.forward(inputs)

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states [T, hidden_size] to the stage after, if there is one."""
        if not self.is_last:
            self._communicator.send(hidden, self._communicator.rank + 1)

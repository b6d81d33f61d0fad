"""TokenExchange: gathers the tokens of all engine cores for a layer's experts, and returns each core's results to it.

The experts are divided among the workers of all cores.

Every rank gives the same number of rows, so tokens are padded to the largest count of any core, on which the cores have
agreed before the step (`distributed.lockstep`). The sums of the ranks are exchanged by one reduce-scatter. Design:
vLLM's naive all-to-all. An exchange that sends a token only to the ranks of its experts saves traffic between nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from argosy_engine.distributed.communicator import Communicator

_PADDING_SLOT = -1


class TokenExchange:
    """The exchange of one worker, which the sparse layers of its model share.

    Args:
        communicator: of the ranks of all cores that hold the same part of the layers, and other experts.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._group = communicator
        self._num_rows: int | None = None
        self._slots: torch.Tensor | None = None
        self._layers: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]] = []

    def add_layer(
        self,
        layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Add a layer that exchanges tokens, in the order in which the model runs them.

        Args:
            layer: maps x [T, hidden_size] and slot_mapping [T] to x's shape.
        """
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self._layers.append((layer, nothing))

    def begin(self, num_rows: int | None = None) -> None:
        """Begin a forward pass.

        Args:
            num_rows: to which every rank pads its tokens. None: all have the same number of tokens.
        """
        self._num_rows, self._slots = num_rows, None

    def lend_experts(self, num_rows: int) -> None:
        """Run the layers of a forward pass in which this rank has no tokens of its own."""
        self.begin(num_rows)
        for layer, nothing in self._layers:
            layer(nothing, nothing.new_empty(0, dtype=torch.int64))

    def gather(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of all ranks, [size * rows, hidden_size], and their slot_mapping, -1 for padding.

        Args:
            x: [T, hidden_size].
            slot_mapping: int64 [T], the same padding in all layers of a forward pass.
        """
        if self._slots is None:
            self._slots = self._group.all_gather(self._padded(slot_mapping, _PADDING_SLOT), dim=0)
        return self._group.all_gather(self._padded(x, 0), dim=0), self._slots

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Add the ranks' results for all tokens [size * rows, hidden_size]; return this rank's [rows, hidden_size]."""
        return self._group.reduce_scatter(x, dim=0)

    def _padded(self, x: torch.Tensor, value: int) -> torch.Tensor:
        padding = 0 if self._num_rows is None else self._num_rows - len(x)
        if not padding:
            return x
        return torch.cat([x, x.new_full((padding, *x.shape[1:]), value)])

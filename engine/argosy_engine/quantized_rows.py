"""QuantizedRows: activations in FP8, between the layer that writes them and the matrix product that reads them.

A product says how it wants its inputs (`RowQuantization`). The layer before it (norm, activation, attention) writes
them so if it can without a launch of its own; otherwise it hands over a plain tensor, and the product quantises that.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class RowQuantization(NamedTuple):
    """How a product wants its inputs to be quantised."""

    scale: torch.Tensor | None
    """float32 [1], of all rows; None: each row has a scale that maps its magnitudes to at most 448."""


class QuantizedRows(NamedTuple):
    """Rows that stand for values * scales."""

    values: torch.Tensor
    """float8_e4m3fn [T, width], contiguous."""
    scales: torch.Tensor
    """float32 [T, 1]"""


Activations = torch.Tensor | QuantizedRows
"""Inputs of a product, [T, width]. Rows are quantised only if the product asked for it."""


class TakesRows(Protocol):
    """A linear layer, or a block that begins with one, as far as the layer before it is concerned."""

    @property
    def input_quantization(self) -> RowQuantization | None:
        """How the inputs should be quantised; None: not at all."""
        ...

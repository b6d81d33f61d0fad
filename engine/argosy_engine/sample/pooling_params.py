"""PoolingParams: how the hidden states of a prompt become one vector. Field names are vLLM's."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from argosy_engine.errors import InvalidRequest
from argosy_engine.sample.checked import Checked


class PoolingParams(
    Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=Checked
):
    """
    Raises (from the constructor):
        InvalidRequest: unknown name, wrong type or value out of bounds.
    """

    pooling_type: Literal["last", "mean"] = "last"
    """The last token's state, or the mean over all tokens."""
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: int | None = None
    """Keep that many leading elements, for models trained so (Matryoshka, arXiv 2205.13147)."""

    @property
    def needs_every_token(self) -> bool:
        """Whether a cached prefix is of no use, because its states are not kept."""
        return self.pooling_type == "mean"

    def verify(self) -> None:
        """Raises InvalidRequest when a value is out of bounds."""
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest("dimensions must be at least 1", param="dimensions")

    def check_dimensions(self, size: int) -> None:
        """
        Args:
            size: elements of the model's vector.

        Raises:
            InvalidRequest: more dimensions than the model has.
        """
        if self.dimensions is not None and self.dimensions > size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {size}, not {self.dimensions}", param="dimensions"
            )

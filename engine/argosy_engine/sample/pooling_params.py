"""PoolingParams: how the hidden states of a prompt become one vector. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Keep that many leading elements, and scale what is left; for models trained so (Matryoshka, arXiv 2205.13147)."""

    @property
    def needs_every_token(self) -> bool:
        """Whether a cached prefix is of no use, because its states are not kept."""
        return self.pooling_type == "mean"

    def verify(self) -> None:
        """Raises InvalidRequest when a value is out of bounds."""
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest("dimensions must be at least 1", param="dimensions")

    def check_dimensions(self, size: int, is_matryoshka: bool, trained: Sequence[int] = ()) -> None:
        """
        Args:
            size: elements of the model's vector.
            is_matryoshka: whether its leading elements are a vector, too.
            trained: how many elements the model was trained to keep; empty for any number.

        Raises:
            InvalidRequest: the model's vectors cannot be cut to that many elements.
        """
        if self.dimensions is None:
            return
        if not is_matryoshka:
            raise InvalidRequest(
                f"dimensions cannot be set: this model is not trained for shorter vectors (Matryoshka), its own have "
                f"{size} elements",
                param="dimensions",
            )
        if trained and self.dimensions not in trained:
            known = ", ".join(map(str, trained))
            raise InvalidRequest(
                f"dimensions must be one of {known}, not {self.dimensions}", param="dimensions"
            )
        if self.dimensions > size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {size}, not {self.dimensions}", param="dimensions"
            )

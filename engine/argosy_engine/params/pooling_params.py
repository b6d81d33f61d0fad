"""PoolingParams: what to make of a prompt's hidden states. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from argosy_engine.errors import InvalidRequest
from argosy_engine.params.validated_struct import ValidatedStructMeta


class PoolingParams(
    Struct,
    kw_only=True,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    metaclass=ValidatedStructMeta,
):
    """Pooling parameters of one request.

    Raises (from the constructor):
        InvalidRequest: unknown name, wrong type or value out of bounds.
    """

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """What to compute; None: what the model is served for. The last two: of each token, instead of the whole prompt."""
    pooling_type: Literal["last", "mean", "cls"] | None = None
    """Which hidden states become the vector; None: those that the model was trained for."""
    use_activation: bool | None = None
    """Whether embeddings are scaled to length 1, and scores become probabilities; None: as the model says."""
    normalize: bool | None = None
    """Older name of `use_activation`, which wins."""
    dimensions: int | None = None
    """Keep this many leading elements, before normalising; for models trained for it (Matryoshka, arXiv 2205.13147)."""
    second_text: int | None = None
    """Index of the first token of a pair's second text, for encoders that tell the two apart. The engine sets it."""

    @property
    def needs_every_token(self) -> bool:
        """Whether a cached prefix cannot be used, because the KV cache does not hold its hidden states."""
        return self.is_token_wise or self.pooling_type in ("mean", "cls")

    @property
    def is_token_wise(self) -> bool:
        """Whether each token has a vector of its own; which ones become the vector does not matter then."""
        return self.task in ("token_embed", "token_classify")

    def replace(self, **changes: Any) -> PoolingParams:
        return msgspec.structs.replace(self, **changes)

    def verify(self) -> None:
        """Check all values.

        Raises:
            InvalidRequest: a value is out of bounds.
        """
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest("dimensions must be at least 1", param="dimensions")
        if self.second_text is not None and self.second_text < 0:
            raise InvalidRequest("second_text must be at least 0", param="second_text")

    def check_dimensions(self, size: int, is_matryoshka: bool, trained: Sequence[int] = ()) -> None:
        """Check `dimensions` against the model.

        Args:
            size: number of elements of the model's vectors.
            is_matryoshka: whether the model supports shorter vectors.
            trained: lengths that the model was trained for; empty for any length.

        Raises:
            InvalidRequest: the model's vectors cannot be shortened to `dimensions`.
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

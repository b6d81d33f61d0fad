"""PoolingParams: how the hidden states of a prompt become one vector. Field names are vLLM's."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec
from msgspec import Struct

from argosy_engine.errors import InvalidRequest


class PoolingParams(Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Bounds are checked by `of`, and against the model by `verify`."""

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

    @classmethod
    def of(cls, **fields: Any) -> PoolingParams:
        """Builds parameters; an unknown name is an error with a suggestion.

        Raises:
            InvalidRequest: unknown name, wrong type or value out of bounds.
        """
        for name in fields:
            if name not in cls.__struct_fields__:
                close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise InvalidRequest(f"unknown pooling parameter {name!r}{hint}", param=name)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at ")
            raise InvalidRequest(message, param=path.partition("$.")[2].rstrip("`") or None) from None

    def verify(self, size: int) -> None:
        """
        Args:
            size: elements of the model's vector.

        Raises:
            InvalidRequest: more dimensions than the model has.
        """
        if self.dimensions is not None and not 1 <= self.dimensions <= size:
            raise InvalidRequest(
                f"dimensions must be between 1 and {size}, not {self.dimensions}", param="dimensions"
            )

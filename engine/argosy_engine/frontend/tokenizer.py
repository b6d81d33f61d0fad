"""Tokenizer: tokenizer.json through the `tokenizers` library.

transformers is not needed for this, and importing it would cost more than the engine's whole start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as _Tokenizer

from argosy_engine.errors import ConfigError


class Encoded(NamedTuple):
    ids: list[int]
    ends: list[int]
    """For each token the offset in characters of its end in the text."""


class Tokenizer:
    """
    Raises (from the constructor):
        ConfigError: no readable tokenizer.json in the model directory.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        try:
            self.backend = _Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"cannot read {file}: {error}") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """Tokens of a text. Thread-safe; the GIL is released while it runs."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        return Encoded(encoding.ids, [end for _, end in encoding.offsets])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

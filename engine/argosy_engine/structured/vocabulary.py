"""The tokenizer's vocabulary as XGrammar wants it: the bytes that each token id stands for.

Read from tokenizer.json in the process that compiles grammars; the engine core gets it as a `TokenTable`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from argosy_engine.errors import ConfigError
from argosy_engine.structured.native import import_xgrammar

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_CONTROL_BYTES = frozenset(range(0x20)) - {0x0A, 0x0D}
"""Bytes that JSON strings may not contain, without those that XGrammar keeps out of strings itself."""


class Vocabulary:
    """
    Args:
        path: the model's directory.
        vocab_size: of the logits, which may have more columns than the tokenizer has tokens.
        eos_token_ids: tokens that end an output.

    Raises:
        ConfigError: tokenizer.json is not there, or its tokens are spelled in an unknown way.
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        try:
            tokenizer = json.loads((path / "tokenizer.json").read_bytes())
            added = tokenizer.get("added_tokens") or []
            tokens = _model_tokens(tokenizer["model"])
            self._kind = _spelling(tokenizer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cannot read the vocabulary of {path / 'tokenizer.json'}: {error}") from None
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokens = [""] * vocab_size
        for token, token_id in tokens:
            if token_id < vocab_size:
                self._tokens[token_id] = token
        # The empty spelling tells XGrammar that a token is no text: the detokeniser leaves special tokens out, so
        # that a grammar must not spell its text with them.
        for entry in added:
            if entry["id"] < vocab_size:
                self._tokens[entry["id"]] = "" if entry.get("special") else entry["content"]
        self.special_token_ids = frozenset(e["id"] for e in added if e.get("special"))

    def table(self) -> TokenTable:
        import_xgrammar()
        table = TokenTable(self._tokens, self._kind, self.vocab_size, self._eos_token_ids, [])
        decoded: Sequence[bytes] = table.tokenizer_info().decoded_vocab
        control = [index for index, text in enumerate(decoded) if _CONTROL_BYTES.intersection(text)]
        return TokenTable(self._tokens, self._kind, self.vocab_size, self._eos_token_ids, control)

    def tokenizer_info(self) -> TokenizerInfo:
        """All tokens."""
        return self.table().tokenizer_info()


class TokenTable(Struct, frozen=True, array_like=True):
    """A vocabulary as it travels between processes."""

    tokens: list[str]
    """By token id; empty for those that are no text."""
    spelling: str
    """How they spell bytes: the name of XGrammar's VocabType."""
    vocab_size: int
    eos_token_ids: list[int]
    control_token_ids: list[int]
    """Tokens with a raw control character other than a newline: XGrammar lets those into strings of bounded length,
    where JSON does not allow them."""

    def tokenizer_info(self, *, for_json: bool = False) -> TokenizerInfo:
        """
        Args:
            for_json: without `control_token_ids`.
        """
        from xgrammar import TokenizerInfo, VocabType

        tokens = self.tokens
        if for_json:
            tokens = list(tokens)
            for token_id in self.control_token_ids:
                tokens[token_id] = ""
        return TokenizerInfo(
            tokens,
            VocabType[self.spelling],
            vocab_size=self.vocab_size,
            stop_token_ids=self.eos_token_ids,
        )


def _model_tokens(model: dict[str, Any]) -> list[tuple[str, int]]:
    """(token, id) of a BPE or WordPiece vocabulary, which is a mapping, or a Unigram one, which is a list."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(token, index) for index, (token, _score) in enumerate(vocab)]


def _spelling(tokenizer: dict[str, Any]) -> str:
    """How tokens spell bytes, from the tokenizer's decoder: the name of XGrammar's VocabType."""
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "BYTE_LEVEL"
    return "BYTE_FALLBACK" if "ByteFallback" in kinds else "RAW"

"""Vocabulary: the bytes of each token id, in the form that XGrammar needs.

It is read from tokenizer.json in the process that compiles grammars; the engine core receives it as a `TokenTable`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from argosy_engine.errors import ConfigError
from argosy_engine.structured.xgrammar_import import import_xgrammar

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_CONTROL_BYTES = frozenset(range(0x20)) - {0x0A, 0x0D}
"""Bytes that JSON strings may not contain, except for those that XGrammar itself keeps out of strings."""


class Vocabulary:
    """
    Args:
        path: the model's directory.
        vocab_size: number of columns of the logits, which may exceed the number of tokens.
        eos_token_ids: tokens that end an output.

    Raises:
        ConfigError: tokenizer.json cannot be read, or has an unknown form.
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
        # An empty spelling tells XGrammar that a token is not text. The detokenizer drops special tokens, so a grammar
        # must not match its text with them.
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
        """Make XGrammar's TokenizerInfo with all tokens."""
        return self.table().tokenizer_info()


class TokenTable(Struct, frozen=True, array_like=True):
    """Vocabulary in the form that is sent between processes."""

    tokens: list[str]
    """Spelling of each token by id; empty for tokens that are not text."""
    spelling: str
    """How tokens spell bytes: the name of an XGrammar VocabType."""
    vocab_size: int
    eos_token_ids: list[int]
    control_token_ids: list[int]
    """Tokens with a raw control character other than a newline. XGrammar allows them in strings of bounded length,
    although JSON does not."""

    def tokenizer_info(self, *, for_json: bool = False) -> TokenizerInfo:
        """Make XGrammar's TokenizerInfo.

        Args:
            for_json: leave out `control_token_ids`.
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
    """Return (token, id) pairs of a BPE or WordPiece vocabulary (a mapping) or a Unigram vocabulary (a list)."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(token, index) for index, (token, _score) in enumerate(vocab)]


def _spelling(tokenizer: dict[str, Any]) -> str:
    """Return how tokens spell bytes, derived from the tokenizer's decoder, as the name of an XGrammar VocabType."""
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "BYTE_LEVEL"
    return "BYTE_FALLBACK" if "ByteFallback" in kinds else "RAW"

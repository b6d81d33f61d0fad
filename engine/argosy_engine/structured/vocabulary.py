"""The tokenizer's vocabulary as XGrammar wants it: the bytes that each token id stands for.

Read from tokenizer.json; the core hands on data here, it never sees text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy_engine.errors import ConfigError

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

    def tokenizer_info(self) -> TokenizerInfo:
        """All tokens."""
        return self._info(self._tokens)

    def json_tokenizer_info(self) -> TokenizerInfo:
        """Without tokens that have a raw control character other than a newline: XGrammar lets those into strings of
        bounded length, where JSON does not allow them."""
        from xgrammar import TokenizerInfo

        decoded: Sequence[bytes] = TokenizerInfo(
            self._tokens, self._kind_value(), vocab_size=self.vocab_size
        ).decoded_vocab
        return self._info(
            [
                "" if _CONTROL_BYTES.intersection(text) else token
                for token, text in zip(self._tokens, decoded, strict=True)
            ]
        )

    def _info(self, tokens: list[str]) -> TokenizerInfo:
        from xgrammar import TokenizerInfo

        return TokenizerInfo(
            tokens, self._kind_value(), vocab_size=self.vocab_size, stop_token_ids=self._eos_token_ids
        )

    def _kind_value(self) -> Any:
        from xgrammar import VocabType

        return VocabType[self._kind]


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

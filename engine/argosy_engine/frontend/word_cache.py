"""WordCache: tokenises ASCII text from the words that it has seen before, as the tokenizer itself would.

A byte-level BPE tokenizer splits a text into words by a pattern and encodes each word by itself, so the tokens of a
text are those of its words. Texts repeat their words: looking them up takes a fifth of the time that the library takes
to encode them again.

Owns: which tokenizers and texts this is exact for, and the words' tokens. Must not know: prompts, templates.
Invariant: `encode` returns what the library does, or None. What is not known to be exact is left to the library: other
kinds of tokenizers, patterns that Python might read differently, text that is not ASCII (for which character classes
differ), texts with many new words. A sample is compared at the load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.models import BPE

MAX_WORDS = 8192
"""Words that are kept, in a megabyte. When they are full they are dropped, and learnt anew."""
_MAX_WORD_CHARS = 64
"""Longer words, which hardly occur twice, are not kept."""
_MAX_NEW_WORDS = 16
"""New words of a text that are learnt one by one; the library is faster if there are many."""
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern of the step `ByteLevel` if no other one splits the text."""
_ASCII_OF_PROPERTY = {
    "L": "A-Za-z",
    "N": "0-9",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
}
_OUTSIDE = re.compile(
    r"\\p\{(?P<property>[A-Za-z]+)\}|(?P<open>\[\^?)|\\[sSdDwWrnt]|\\[^\w\s]|\(\?i:|\(\?[:!]|\((?!\?)|\)"
    r"|\{\d+(?:,\d*)?\}(?![+?])|[^\\\[\](){}^$]"
)
_IN_CLASS = re.compile(r"\\p\{(?P<property>[A-Za-z]+)\}|(?P<close>\])|\\[sSdDwWrnt]|\\[^\w\s]|[^\\\[\]&~|]")
"""The parts of patterns, outside and inside of character classes, that mean the same in Oniguruma and in Python for
ASCII text."""
_SAMPLE = (
    "Hello, world! It's 12345 o'clock:  we'LL see\n\n  if\tthis  works... {\"a\": [1, 2.5], 'b': None}\r\n"
    "def f(x):\n    return x**2 + 3 # Why?  \n\n\nURLs: http://a.b/c?d=e&f=g; I'd've snake_case, camelCase ABCdef"
    " XyZ\x0b\x0c \x1c\x1d\x1e\x1f \x7f~`@$%^&*()-_=+|\\;:<>/?.   "
)


class _TooManyNewWords(Exception):
    """The library is to encode this text."""


class WordCache(dict[str, tuple[int, ...]]):
    """The tokens of words. A word that is looked up for the first time is encoded by the model.

    Args:
        backend: the library's tokenizer.
        words: matches the words of an ASCII text, one after the other.
        added: texts of the tokens beside the vocabulary proper that are ASCII, by id.
    """

    def __init__(self, backend: _Tokenizer, words: re.Pattern[str], added: Mapping[int, str]) -> None:
        super().__init__()
        self._model = backend.model
        self._find_words = words.findall
        self._added = {text: token_id for token_id, text in added.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split if added else None
        self._chars = {token_id: len(text) for token_id, text in added.items()}
        """Lengths in characters of the tokens of the words that have been seen."""
        self._num_new = 0
        """New words of the text that is being encoded."""

    @classmethod
    def of(cls, backend: _Tokenizer) -> WordCache | None:
        """Return the cache of a tokenizer; None if it is of another kind."""
        model, added = backend.model, backend.get_added_tokens_decoder()
        pattern = _word_pattern(_state(backend.pre_tokenizer))
        words = ascii_pattern(pattern) if pattern is not None and pattern.isascii() else None
        if words is None or not isinstance(model, BPE) or model.dropout:
            return None
        if _state(backend.normalizer).get("type", "NFC") != "NFC":  # which leaves ASCII as it is
            return None
        if model.continuing_subword_prefix or model.end_of_word_suffix or backend.encode_special_tokens:
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
            return None
        if len({token.normalized for token in added.values()}) > 1:  # then it matters which are found first
            return None
        texts = {token_id: str(token.content) for token_id, token in added.items()}
        cache = cls(backend, words, {token_id: text for token_id, text in texts.items() if text.isascii()})
        return cache if cache._agrees_with(backend) else None

    def _agrees_with(self, backend: _Tokenizer) -> bool:
        """Whether words and tokens of a sample are those of the library."""
        words = [_SAMPLE[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(_SAMPLE)]
        if words != self._find_words(_SAMPLE):
            return False
        sample = " ".join((_SAMPLE, *self._added, _SAMPLE))
        self._num_new = -len(sample)
        try:
            return self._tokens(sample) == backend.encode(sample, add_special_tokens=False).ids
        except ValueError:
            return False

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text, without special ones around it; None if the library must encode it."""
        if not text.isascii():
            return None
        self._num_new = 0
        try:
            return self._tokens(text)
        except (_TooManyNewWords, ValueError):
            return None

    def ends(self, token_ids: Sequence[int]) -> list[int]:
        """Return the end of each token, in characters, of a text that `encode` has encoded."""
        return list(accumulate(map(self._chars.__getitem__, token_ids)))

    def __missing__(self, word: str) -> tuple[int, ...]:
        self._num_new += 1
        if self._num_new > _MAX_NEW_WORDS:
            raise _TooManyNewWords
        tokens = self._model.tokenize(word.translate(_BYTE_LEVEL))
        token_ids = tuple(token.id for token in tokens)
        if sum(len(token.value) for token in tokens) != len(word):
            raise ValueError("the vocabulary lacks a byte of this word")
        self._chars.update((token.id, len(token.value)) for token in tokens)
        if len(word) <= _MAX_WORD_CHARS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = token_ids
        return token_ids

    def _tokens(self, text: str) -> list[int]:
        """
        Raises:
            ValueError: the words are not the whole text.
        """
        parts = [text] if self._split is None else self._split(text)
        if len(parts) == 1:
            return self._tokens_of_words(text)
        tokens: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                tokens.append(self._added[part])
            elif part:
                tokens += self._tokens_of_words(part)
        return tokens

    def _tokens_of_words(self, text: str) -> list[int]:
        words = self._find_words(text)
        if sum(map(len, words)) != len(text):
            raise ValueError("the pattern does not match all of the text")
        return list(chain.from_iterable(map(self.__getitem__, words)))


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """Translate a pattern of Oniguruma for Python, to match the same in ASCII text; None if that is unsure."""
    made: list[str] = []
    position, in_class = 0, False
    while position < len(pattern):
        found = (_IN_CLASS if in_class else _OUTSIDE).match(pattern, position)
        if found is None:
            return None
        position = found.end()
        text = found.group()
        if name := found["property"]:
            if name not in _ASCII_OF_PROPERTY:
                return None
            text = _ASCII_OF_PROPERTY[name] if in_class else f"[{_ASCII_OF_PROPERTY[name]}]"
        elif found.lastgroup == "open":
            in_class = True
        elif found.lastgroup == "close":
            in_class = False
        elif text == "(":
            text = "(?:"
        made.append(text)
    try:
        compiled = re.compile("".join(made), re.ASCII)
    except re.error:  # such as a class of characters that are not ASCII
        return None
    return None if compiled.match("") else compiled


def _word_pattern(steps: dict[str, Any]) -> str | None:
    """Return the pattern by which a pre-tokenizer splits texts into words; None if it does anything else."""
    *splits, last = steps.get("pretokenizers", [steps])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not splits:
        return _GPT2_PATTERN if last.get("use_regex") else None
    (split,) = splits if len(splits) == 1 else [{}]
    is_plain = split.get("type") == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if not is_plain or last.get("use_regex"):
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def _state(step: Any) -> dict[str, Any]:
    """Return the settings of a step of a tokenizer; empty if there is no such step."""
    state: dict[str, Any] = {} if step is None else json.loads(step.__getstate__())
    return state


def _byte_level() -> dict[int, str]:
    """Return GPT-2's mapping of the ASCII bytes to printable characters, as far as it changes them."""
    others = [byte for byte in range(256) if not (0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte >= 0xAE)]
    return {byte: chr(256 + number) for number, byte in enumerate(others) if byte < 128}


_BYTE_LEVEL = _byte_level()

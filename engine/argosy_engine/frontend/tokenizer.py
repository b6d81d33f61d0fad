"""Tokenizer: loads tokenizer.json with the `tokenizers` library, and looks up words that were seen before.

transformers is not used, because importing it takes longer than the rest of the engine's start. What other forms a
tokenizer may have, and which of them become a tokenizer.json: `checkpoint.tokenizer_files`.

A byte-level BPE tokenizer splits a text into words by a pattern and encodes each word by itself, so the tokens of a
text are those of its words, which repeat: looking them up takes a fifth of the library's time. Invariant:
`WordCache.encode` returns what the library does, or None. What is not known to be exact is left to the library: other
kinds of tokenizers, patterns that Python might read differently, text that is not ASCII (for which character classes
differ), texts with many new words. A sample is compared at the load.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Encoding
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.models import BPE

from argosy_engine.checkpoint.tokenizer_files import find_tokenizer
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.model_configs.model_config import read_json
from argosy_fetcher.selection import TOKENIZER

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


_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
"""Form of control tokens. DeepSeek's role markers, for example, are not marked as special."""
INLINE_CHARS = 16384
"""Texts up to this size are tokenised in a few milliseconds, or checked as a grammar in ten at most."""
MAX_DECODED_TOKENS = 1 << 17
"""Tokens that the library decodes at once, which holds the interpreter for some 25 ms."""
SLICE_TOKENS = 1 << 14
"""Tokens that are joined at once, in which time no other thread runs."""


class Encoded(Protocol):
    """Tokens of a text. Lists are made on demand, because a long text has many tokens."""

    def __len__(self) -> int: ...

    @property
    def ids(self) -> list[int]: ...

    @property
    def ends(self) -> list[int]:
        """The end of each token in the text, in characters."""
        ...


class _EncodedPieces:
    """Tokens of a text that the library has encoded, in pieces."""

    def __init__(self, pieces: Sequence[tuple[int, Encoding]]) -> None:
        self._pieces = pieces
        """Pairs of an offset in characters and the tokens from there on."""

    def __len__(self) -> int:
        return sum(len(encoding) for _, encoding in self._pieces)

    @property
    def ids(self) -> list[int]:
        if len(self._pieces) == 1:
            return self._pieces[0][1].ids
        return [token_id for _, encoding in self._pieces for token_id in encoding.ids]

    @property
    def ends(self) -> list[int]:
        if len(self._pieces) == 1:
            return [end for _, end in self._pieces[0][1].offsets]
        return [start + end for start, encoding in self._pieces for _, end in encoding.offsets]


class _EncodedWords:
    """Tokens of a text whose words were known."""

    def __init__(self, ids: list[int], words: WordCache) -> None:
        self.ids = ids
        self._words = words

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ends(self) -> list[int]:
        return self._words.ends(self.ids)


class Tokenizer:
    """
    Raises (from the constructor):
        ConfigError: the model directory has no readable tokenizer.json.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = path / TOKENIZER
        if not file.exists():
            find_tokenizer(path)  # which says what to do
        try:
            # Read here: the library would hold the interpreter's lock, for ever if the volume is lost.
            self.backend = _Tokenizer.from_buffer(file.read_bytes())
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"cannot read {file}: {error}") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder()
        self._added = {id_: str(token.content) for id_, token in added.items()}
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.control_tokens = {
            content: id_
            for id_, content in self._added.items()
            if (id_ in self.special_ids or _CONTROL.fullmatch(content)) and len(content) > 1
        }
        """Text -> id of control tokens, which chat templates write and users must not."""
        decoder = self.backend.decoder
        self._words = WordCache.of(self.backend)
        self._decoder_steps = _types(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._pieces = _BytePieces(self) if self._decoder_steps == {"ByteLevel"} else None
        self._texts = None if self._pieces is None else _WholeTexts(self._pieces)

    @property
    def added_tokens(self) -> frozenset[str]:
        """Texts of the tokens beside the vocabulary proper: the special ones and others that are always one token."""
        return frozenset(self._added.values())

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts of the special tokens that have one, by id."""
        return {id_: text for id_, text in sorted(self._added.items()) if id_ in self.special_ids and text}

    @cached_property
    def max_token_chars(self) -> int:
        """Maximum number of characters of a token."""
        return max(len(token) for token in self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def num_added(self) -> tuple[int, int]:
        """Numbers of tokens that `add_special_tokens` adds before and after a text."""
        text = self.encode("a", add_special_tokens=False).ids
        whole = self.encode("a", add_special_tokens=True).ids
        num_all = len(whole) - len(text)
        first = next(i for i in range(num_all + 1) if whole[i : i + len(text)] == text)
        return first, num_all - first

    @cached_property
    def adds_special_tokens(self) -> bool:
        """Whether encoding with `add_special_tokens` adds any."""
        return bool(self.backend.num_special_tokens_to_add(is_pair=False))

    def encode(self, text: str, *, add_special_tokens: bool, cuts: Sequence[int] = ()) -> Encoded:
        """Tokenise a text. Thread-safe; releases the GIL for long texts.

        Args:
            cuts: ascending offsets in characters that no token may cross; empty with `add_special_tokens`.
        """
        if not cuts and len(text) <= INLINE_CHARS:
            if self._words is not None and not (add_special_tokens and self.adds_special_tokens):
                ids = self._words.encode(text)
                if ids is not None:
                    return _EncodedWords(ids, self._words)
            return _EncodedPieces([(0, self.backend.encode(text, add_special_tokens=add_special_tokens))])
        starts = [0, *cuts]
        parts = [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True)]
        # `encode` holds the GIL.
        encodings = self.backend.encode_batch(parts, add_special_tokens=add_special_tokens)
        return _EncodedPieces(list(zip(starts, encodings, strict=True)))

    @cached_property
    def special_tokens_of_text(self) -> list[list[int]]:
        """Special tokens that a text gets: those before it, and those after it."""
        return self._special_tokens(1)

    @cached_property
    def special_tokens_of_pair(self) -> list[list[int]]:
        """Special tokens that a pair of texts gets: those before the first, between the two, and after the second."""
        return self._special_tokens(2)

    @cached_property
    def types_second_text(self) -> bool:
        """Whether the tokens of a pair are of type 0, and from its second text on of type 1; otherwise all are of
        type 0.

        Raises:
            InvalidRequest: the tokenizer gives them other types.
        """
        settings = self._path / "tokenizer_config.json"
        inputs = read_json(settings).get("model_input_names") if settings.is_file() else None
        whole = self.backend.encode("a", "a")
        if not any(whole.type_ids) or (isinstance(inputs, list) and "token_type_ids" not in inputs):
            return False
        second = whole.sequence_ids.index(1)
        if whole.type_ids != [int(index >= second) for index in range(len(whole.ids))]:
            raise InvalidRequest(
                "this model's tokenizer gives pairs of texts token types that are not supported"
            )
        return True

    def _special_tokens(self, num_texts: int) -> list[list[int]]:
        whole = self.backend.encode("a", "a" if num_texts > 1 else None)
        found: list[list[int]] = [[] for _ in range(num_texts + 1)]
        num_passed = 0
        for token_id, text in zip(whole.ids, whole.sequence_ids, strict=True):
            if text is None:
                found[num_passed].append(token_id)
            else:
                num_passed = text + 1
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_long(self, ids: Sequence[int]) -> str:
        """Decode tokens, special ones included. Lets other threads run meanwhile where tokens stand for bytes.

        Raises:
            InvalidRequest: there are more than `MAX_DECODED_TOKENS` for a tokenizer of another kind.
        """
        if self._pieces is not None:
            slices = (ids[start : start + SLICE_TOKENS] for start in range(0, len(ids), SLICE_TOKENS))
            with contextlib.suppress(ValueError):
                joined = [b"".join(map(self._pieces.__getitem__, each)) for each in slices]
                return b"".join(joined).decode("utf-8", "replace")
        if len(ids) > MAX_DECODED_TOKENS:
            raise InvalidRequest(
                f"tokens has {len(ids)} entries, at most {MAX_DECODED_TOKENS} are decoded at once; send them in parts",
                "tokens",
            )
        return self.decode(ids, skip_special_tokens=False)

    def text_after(
        self, context: Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
    ) -> str | None:
        """Return the text that decoding `ids` one by one makes, after the tokens of a context; None if only that can
        tell it: bytes of either that are no text, or another kind of tokenizer."""
        if self._pieces is None:
            return None
        if skip_special_tokens and not self.special_ids.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        try:
            before = b"".join(map(self._pieces.__getitem__, context)).decode()
            text = b"".join(map(self._pieces.__getitem__, ids)).decode()
        except ValueError:
            return None
        return None if "\ufffd" in text or "\ufffd" in before else text

    def whole_text(self, token_id: int) -> str | None:
        """Return the text that a token of a byte-level tokenizer adds to text that ends with a whole character; None if
        only decoding can tell it, as of `text_after`."""
        return None if self._texts is None else self._texts[token_id]

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as spelled in the vocabulary; empty for an id without a token."""
        return [self.backend.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which need not be valid UTF-8 alone; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_steps:
            alphabet = _byte_alphabet()
            return bytes(alphabet[char] for char in token if char in alphabet)
        if "ByteFallback" in self._decoder_steps and len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece's visible space

    def token_text(self, token_id: int) -> str:
        """Return the token as text; bytes that are not a character alone become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class _BytePieces(dict[int, bytes]):
    """The bytes of a byte-level tokenizer's tokens, each of which is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._backend = tokenizer.backend
        self._added = tokenizer.added_tokens

    def __missing__(self, token_id: int) -> bytes:
        """
        Raises:
            ValueError: the decoder might read this token differently.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"there is no token {token_id}")
        if token in self._added:
            piece = token.encode("ascii")
        else:
            alphabet = _byte_alphabet()
            if not all(char in alphabet for char in token):
                raise ValueError(f"the token {token_id} has characters that stand for no byte")
            piece = bytes(alphabet[char] for char in token)
        self[token_id] = piece
        return piece


class _WholeTexts(dict[int, str | None]):
    """The texts of tokens whose bytes are whole characters, by tokens; None for others."""

    def __init__(self, pieces: _BytePieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode()
        except ValueError:
            return None  # not kept: ids without a token have no bound
        self[token_id] = found = None if "\ufffd" in text else text
        return found


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the inverse of GPT-2's mapping of bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _types(decoder: object) -> set[str]:
    """Return the names of a decoder's steps, from its JSON."""
    if isinstance(decoder, dict):
        return {str(decoder.get("type"))}.union(*(_types(part) for part in decoder.get("decoders", ())))
    return set()

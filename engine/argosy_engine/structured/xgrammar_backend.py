"""XGrammarBackend: compiles grammar specs with XGrammar, for one model's vocabulary.

It runs in the process that compiles grammars, where it may take its time: it reads the vocabulary from tokenizer.json,
compiles, and probes some steps. Its results are sent to the engine core as text (`Serialized`, `TokenTable`).

XGrammar's package imports torch and transformers, for annotations and for features that are not used here, which takes
up to four seconds and 500 MiB. While it is imported, those of the two that are not loaded yet are replaced by
placeholder modules. The import then takes 0.5 s and 60 MiB in a process of its own, and 0.1 s in one that has loaded
torch. If it fails, because a later XGrammar needs more of them, it is repeated with the real packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from argosy_engine.errors import ConfigError
from argosy_engine.structured.compile_queue import Grammar
from argosy_engine.structured.structural_tag import MAX_WHITESPACE
from argosy_engine.structured.structured_outputs_params import GrammarSpec

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo
    from xgrammar import GrammarCompiler as NativeCompiler


class Serialized(Struct, frozen=True, array_like=True):
    """A compiled grammar without its vocabulary."""

    text: str
    is_for_json: bool
    """Whether it was compiled with the vocabulary without control characters (`TokenTable.tokenizer_info`)."""


class XGrammarBackend:
    """
    Args:
        make_vocabulary: reads the vocabulary; called once, by `prepare`.
        num_threads: native threads per compilation.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], num_threads: int) -> None:
        self._make_vocabulary = make_vocabulary
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._table: TokenTable | None = None
        self._token_lengths: NDArray[np.int64] | None = None
        self._compilers: dict[bool, NativeCompiler] = {}

    def prepare(self) -> TokenTable:
        """Import the library and read the vocabulary, once.

        Raises:
            ConfigError: the vocabulary cannot be read.
        """
        with self._lock:
            if self._table is None:
                import_xgrammar()
                self._table = self._make_vocabulary().table()
            return self._table

    def warm_up(self) -> None:
        """Make everything that compilations share, so that forks inherit it. Raises as `prepare` does."""
        self.token_lengths()
        for for_json in (False, True):
            self._compiler(for_json=for_json)

    def token_lengths(self) -> NDArray[np.int64]:
        """Return int64 [vocab_size], the bytes of each token; 0 for tokens that are not text."""
        if self._token_lengths is None:
            tokens = self.prepare().tokenizer_info().decoded_vocab
            self._token_lengths = np.array([len(token) for token in tokens], np.int64)
        return self._token_lengths

    def serialized(self, spec: GrammarSpec, grammar: CompiledGrammar) -> Serialized:
        """Serialize the result of `compile(spec)`."""
        return Serialized(grammar.serialize_json(), _is_for_json(spec))

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. Raises RuntimeError or ValueError if it is invalid; the message tells why."""
        compiler = self._compiler(for_json=_is_for_json(spec))
        match spec.kind:
            case "json":
                return compiler.compile_json_schema(
                    spec.text,
                    any_whitespace=spec.any_whitespace,
                    max_whitespace_cnt=MAX_WHITESPACE if spec.any_whitespace else None,
                )
            case "regex":
                return compiler.compile_regex(spec.text)
            case "grammar":
                return compiler.compile_grammar(spec.text)
            case "structural_tag":
                return compiler.compile_structural_tag(spec.text)

    def _compiler(self, *, for_json: bool) -> NativeCompiler:
        table = self.prepare()
        with self._lock:
            if for_json not in self._compilers:
                from xgrammar import GrammarCompiler

                # `CompileQueue` has the cache.
                self._compilers[for_json] = GrammarCompiler(
                    table.tokenizer_info(for_json=for_json),
                    max_threads=self._num_threads,
                    cache_enabled=False,
                )
            return self._compilers[for_json]


NATIVE_BYTES_PER_CHARACTER = 2
"""Memory of a compiled grammar for each character of its serialized form (XGrammar 0.2.9: 0.9 to 1.5). XGrammar counts
its masks only, and the text that it was compiled from tells nothing: 39 characters (`multipleOf`) become 50 MB, and
20,000 of a description nothing."""
LARGE_BYTES = 4 << 20
"""Longer grammars are deserialized one at a time, because it takes up to fifteen times their length for a moment."""


class Deserializer:
    """Turns serialized grammars into grammars of this process."""

    def __init__(self, table: TokenTable) -> None:
        import_xgrammar()
        self._table = table
        self._lock, self._large = threading.Lock(), threading.Lock()
        self._infos: dict[bool, TokenizerInfo] = {}

    def grammar(self, encoded: memoryview | bytes) -> Grammar:
        """Deserialize a grammar, in a tenth of the time of compiling it and mostly in native code without the GIL.

        Args:
            encoded: a `Serialized` in msgpack.
        """
        from xgrammar import CompiledGrammar

        with self._large if len(encoded) > LARGE_BYTES else contextlib.nullcontext():
            serialized = msgspec.msgpack.decode(encoded, type=Serialized)
            compiled = CompiledGrammar.deserialize_json(serialized.text, self._info(serialized.is_for_json))
        size = int(compiled.memory_size_bytes) + NATIVE_BYTES_PER_CHARACTER * len(serialized.text)
        return Grammar(compiled, size)

    def _info(self, for_json: bool) -> TokenizerInfo:
        with self._lock:
            if for_json not in self._infos:
                self._infos[for_json] = self._table.tokenizer_info(for_json=for_json)
            return self._infos[for_json]


def _is_for_json(spec: GrammarSpec) -> bool:
    """Whether to leave out control characters: XGrammar allows them in JSON only in strings of bounded length."""
    is_bounded = '"minLength"' in spec.text or '"maxLength"' in spec.text
    return is_bounded and spec.kind in ("json", "structural_tag")


_CONTROL_BYTES = frozenset(range(0x20)) - {0x0A, 0x0D}
"""Bytes that JSON strings may not contain, except for those that XGrammar itself keeps out of strings."""


class Vocabulary:
    """The bytes of each token id, in the form that XGrammar needs.

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


MAX_STEP_S = 0.1
"""Limit on the CPU time of filling a bitmask or accepting a token. Usual grammars take microseconds, unusual ones
milliseconds."""
MAX_PROBE_S = 1.0
"""CPU time after which the probe takes no more steps."""
NUM_STEPS = 16
"""Maximum number of steps per walk."""


class TooSlow(ValueError):
    """Raised if a step of a grammar takes too long."""


def check_steps(
    grammar: CompiledGrammar,
    token_lengths: NDArray[np.int64],
    cpu_time: Callable[[], float] = time.thread_time,
) -> None:
    """Walk through the grammar, twice with the shortest tokens that it allows and once with random ones.

    The duration of a step depends on the grammar and on the position in it, so a probe proves nothing. It rejects
    grammars that are slow from the start, as most slow ones are; `BoundedThread` handles the rest.

    Args:
        token_lengths: int64 [vocab_size], bytes of each token; 0 for tokens that are not text.
        cpu_time: returns the thread's CPU time in seconds.

    Raises:
        TooSlow: a step took more than `MAX_STEP_S`.
    """
    from xgrammar import GrammarMatcher

    bitmask = np.zeros((1, -(-len(token_lengths) // 32)), np.int32)
    ends = cpu_time() + MAX_PROBE_S
    choice = random.Random(0)  # noqa: S311 (the same walk for the same grammar)
    for is_short in (True, True, False):
        matcher = GrammarMatcher(grammar)
        for _ in range(NUM_STEPS):
            started = cpu_time()
            matcher.fill_next_token_bitmask(bitmask, 0)
            filled = cpu_time()
            _check(filled - started)
            token_id = _choose(bitmask, token_lengths, choice, is_short)
            if token_id is None or filled > ends:
                break
            started = cpu_time()
            matcher.accept_token(token_id)
            _check(cpu_time() - started)


def _check(seconds: float) -> None:
    if seconds > MAX_STEP_S:
        raise TooSlow(
            f"a single step takes {seconds:.2f} s, more than {MAX_STEP_S:g} s: "
            "make the grammar less ambiguous, with fewer parts that can match the same text"
        )


def _choose(
    bitmask: NDArray[np.int32], lengths: NDArray[np.int64], choice: random.Random, is_short: bool
) -> int | None:
    """Choose a text token that the bitmask allows, or None if there is none."""
    allowed = np.flatnonzero(np.unpackbits(bitmask[0].view(np.uint8), bitorder="little")[: len(lengths)])
    allowed = allowed[lengths[allowed] > 0]
    if not len(allowed):
        return None
    if is_short:
        allowed = allowed[lengths[allowed] == lengths[allowed].min()]
    return int(allowed[choice.randrange(len(allowed))])


_UNUSED = ("torch", "transformers")
_SIGACTION_BYTES = 1024
"""At least the size of C's `struct sigaction`, which is 152 with glibc on x86-64."""
_lock = threading.Lock()


class _Placeholder(types.ModuleType):
    """Module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def import_xgrammar() -> None:
    """Import XGrammar, so that a later `import xgrammar` costs nothing. Thread-safe."""
    with _lock:
        if "xgrammar" in sys.modules:
            return
        with _kept_handler(signal.SIGSEGV):
            _import()


@contextlib.contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[None]:
    """Put back what handles a signal now. In C: it may be faulthandler's function, which `signal` does not tell of.

    The library below XGrammar (tvm_ffi) handles SIGSEGV with a function that looks up and prints names of functions,
    which is not safe in a signal handler: it may wait for a lock that the interrupted code holds, and a process that
    has crashed then hangs.
    """
    sigaction = ctypes.CDLL(None).sigaction
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    is_known = sigaction(number, None, before) == 0
    try:
        yield
    finally:
        if is_known:
            sigaction(number, before, None)


def _import() -> None:
    unused = [name for name in _UNUSED if name not in sys.modules]
    try:
        for name in unused:
            sys.modules[name] = None  # type: ignore[assignment]  # tvm_ffi works without them
        import tvm_ffi  # noqa: F401

        for name in unused:
            sys.modules[name] = _Placeholder(name)
        import xgrammar
    except Exception:
        _forget(*unused)
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
        import xgrammar  # noqa: F401
    finally:
        _forget(*unused)


def _forget(*names: str) -> None:
    for name in names:
        if isinstance(sys.modules.get(name, None), _Placeholder | None):
            sys.modules.pop(name, None)

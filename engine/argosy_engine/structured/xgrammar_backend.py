"""XGrammarBackend: compiles grammar specs with XGrammar, for one model's vocabulary.

It runs in the process that compiles grammars, where it may take its time, and its results are sent to the engine core
as text (`Serialized`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from argosy_engine.structured.structural_tag import MAX_WHITESPACE
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from argosy_engine.structured.vocabulary import TokenTable, Vocabulary
from argosy_engine.structured.xgrammar_import import import_xgrammar

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


class Deserializer:
    """Turns serialized grammars into grammars of this process."""

    def __init__(self, table: TokenTable) -> None:
        import_xgrammar()
        self._table = table
        self._lock = threading.Lock()
        self._infos: dict[bool, TokenizerInfo] = {}

    def grammar(self, serialized: Serialized) -> CompiledGrammar:
        """Deserialize a grammar, in a tenth of the time of compiling it and mostly in native code without the GIL."""
        from xgrammar import CompiledGrammar

        with self._lock:
            if serialized.is_for_json not in self._infos:
                self._infos[serialized.is_for_json] = self._table.tokenizer_info(
                    for_json=serialized.is_for_json
                )
        return CompiledGrammar.deserialize_json(serialized.text, self._infos[serialized.is_for_json])


def _is_for_json(spec: GrammarSpec) -> bool:
    """Whether to leave out control characters: XGrammar allows them in JSON only in strings of bounded length."""
    is_bounded = '"minLength"' in spec.text or '"maxLength"' in spec.text
    return is_bounded and spec.kind in ("json", "structural_tag")

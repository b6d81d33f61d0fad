"""XGrammarBackend: specs to XGrammar's compiled grammars, for one model's vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from argosy_engine.structured.params import GrammarSpec
from argosy_engine.structured.structural_tag import MAX_WHITESPACE
from argosy_engine.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar
    from xgrammar import GrammarCompiler as NativeCompiler


class XGrammarBackend:
    """
    Args:
        make_vocabulary: called once, by the first compilation.
        num_threads: native threads of one compilation.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], num_threads: int) -> None:
        self._make_vocabulary = make_vocabulary
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compilers: dict[bool, NativeCompiler] = {}

    def prepare(self) -> None:
        with self._lock:
            if self._vocabulary is None:
                import xgrammar  # noqa: F401

                self._vocabulary = self._make_vocabulary()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        # Strings of bounded length are the one place where XGrammar lets control characters into JSON.
        is_bounded = '"minLength"' in spec.text or '"maxLength"' in spec.text
        compiler = self._compiler(for_json=is_bounded and spec.kind in ("json", "structural_tag"))
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
        import xgrammar

        with self._lock:
            assert self._vocabulary is not None, "prepare() comes first"
            if for_json not in self._compilers:
                info = (
                    self._vocabulary.json_tokenizer_info() if for_json else self._vocabulary.tokenizer_info()
                )
                # Its cache would count the grammars that ours holds a second time.
                self._compilers[for_json] = xgrammar.GrammarCompiler(
                    info, max_threads=self._num_threads, cache_enabled=False
                )
            return self._compilers[for_json]

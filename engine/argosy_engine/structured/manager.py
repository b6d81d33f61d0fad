"""StructuredOutputManager: the grammars of the requests that have one, by request id.

Lives in the engine core's thread, except for `_finished`, which compile threads call. Knows token ids and request ids,
nothing of scheduling: the core asks it for masks and tells it what was sampled.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from argosy_engine.structured.compiler import GrammarCompiler, NoGrammar
from argosy_engine.structured.grammar import GrammarState
from argosy_engine.structured.params import GrammarSpec
from argosy_engine.structured.reasoning import Reasoning
from argosy_engine.structured.vocabulary import Vocabulary
from argosy_engine.structured.xgrammar_backend import XGrammarBackend

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

_MAX_COMPILE_THREADS = 8
_NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})


class GrammarRequest(Struct, frozen=True, array_like=True):
    """What the core gets of a request's structured outputs."""

    spec: GrammarSpec
    reasoning: Reasoning | None = None


class Compiled(Struct, frozen=True):
    """The end of a wait for a grammar."""

    request_id: str
    error: str | None
    is_overload: bool = False
    """Whether the error may be gone later."""


class StructuredOutputManager:
    """
    Args:
        vocab_size: of the logits.
        wake: called from another thread when `take_compiled` has something new.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        vocab_size: int,
        eos_token_ids: Collection[int],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.compiler = compiler
        self.wake = wake
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: dict[str, tuple[GrammarRequest, Sequence[int]]] = {}
        self._states: dict[str, GrammarState] = {}
        self._done: deque[tuple[str, CompiledGrammar | NoGrammar]] = deque()
        """From compile threads; append and popleft are atomic."""
        self._compiled = threading.Event()
        self._bitmask = np.empty((0, self._num_words), np.int32)

    @classmethod
    def for_model(
        cls, model_path: str, vocab_size: int, eos_token_ids: Collection[int], cache_bytes: int
    ) -> StructuredOutputManager:
        """For a model's directory, compiling with half of the cores. Nothing is loaded before the first grammar."""
        num_threads = max(1, min(_MAX_COMPILE_THREADS, len(os.sched_getaffinity(0)) // 2))
        backend = XGrammarBackend(
            lambda: Vocabulary(Path(model_path), vocab_size, eos_token_ids), num_threads
        )
        compiler = GrammarCompiler(backend, num_threads=num_threads, cache_bytes=cache_bytes)
        return cls(compiler, vocab_size, eos_token_ids)

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    @property
    def has_compiled(self) -> bool:
        return bool(self._done)

    def __bool__(self) -> bool:
        """Whether a request has a grammar."""
        return bool(self._states)

    @property
    def request_ids(self) -> list[str]:
        """Requests that have a grammar or wait for it."""
        return [*self._states, *self._waiting]

    def add(self, request_id: str, request: GrammarRequest, output: Sequence[int] = ()) -> None:
        """Asks for a request's grammar; `take_compiled` will have it, or why there is none.

        Args:
            output: tokens of an earlier run, which the grammar is to follow first.
        """
        self._waiting[request_id] = request, output
        grammar = self.compiler.submit(request.spec, lambda result: self._finished(request_id, result))
        if grammar is not None:
            self._finished(request_id, grammar)

    def take_compiled(self) -> list[Compiled]:
        """The requests whose wait has ended since the last call."""
        self._compiled.clear()
        compiled = []
        while self._done:
            request_id, result = self._done.popleft()
            if request_id not in self._waiting:
                continue  # aborted meanwhile
            request, output = self._waiting.pop(request_id)
            if isinstance(result, NoGrammar):
                compiled.append(Compiled(request_id, result.reason, result.is_overload))
            else:
                self._states[request_id] = GrammarState(result, request.reasoning, self._eos_token_ids)
                compiled.append(Compiled(request_id, self.accept(request_id, output)))
        return compiled

    def wait(self) -> None:
        """Blocks until `take_compiled` has something new; only while `is_waiting`."""
        self._compiled.wait()

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._states.pop(request_id, None)

    def replay(self, request_id: str, output: Sequence[int]) -> None:
        """Brings a request's grammar to the end of these tokens, whatever it has followed so far."""
        state = self._states.get(request_id)
        if state is not None:
            state.rollback(state.num_tokens)
            self.accept(request_id, output)

    def bitmask(self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS) -> bytes:
        """int32 [rows, ceil(vocab_size / 32)] in C order: what each may say next, and behind each of its drafts. Behind
        one that is not allowed everything is: nobody will get there."""
        num_rows = sum(1 + len(drafts.get(request_id, ())) for request_id in request_ids)
        if len(self._bitmask) < num_rows:
            self._bitmask = np.empty((num_rows, self._num_words), np.int32)
        row = 0
        for request_id in request_ids:
            state, num_followed = self._states[request_id], 0
            state.fill(self._bitmask, row)
            for depth, token_id in enumerate(drafts.get(request_id, ())):
                row += 1
                if depth == num_followed and not state.is_terminated and state.accept(token_id):
                    num_followed += 1
                    state.fill(self._bitmask, row)
                else:
                    self._bitmask[row] = -1
            state.rollback(num_followed)
            row += 1
        return self._bitmask[:num_rows].tobytes()

    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """Books sampled tokens; why the request cannot go on, or None."""
        state = self._states.get(request_id)
        if state is None:
            return None
        for token_id in token_ids:
            if state.is_terminated:
                break  # what was drawn behind the end, verifying drafts, is nobody's
            if not state.accept(token_id):
                return "no token satisfies the structured output together with the request's other limits"
        if state.is_too_slow:
            return "matching the output against this grammar takes too long; make the grammar less ambiguous"
        return None

    def close(self) -> None:
        self.compiler.close()

    def _finished(self, request_id: str, result: CompiledGrammar | NoGrammar) -> None:
        self._done.append((request_id, result))
        self._compiled.set()
        self.wake()

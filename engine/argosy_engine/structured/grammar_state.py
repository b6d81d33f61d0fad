"""GrammarState: the position of one output in its grammar, and in the reasoning before it.

A reasoning model thinks before the grammar begins. An output has three phases, distinguished by token ids only:

    start       the first tokens open a think block, or the first token is the grammar's first
    reasoning   any token but EOS, up to the tokens of `</think>`
    content     tokens that the grammar allows; EOS only where the grammar may end
"""

from __future__ import annotations

import time
from collections.abc import Collection
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from argosy_engine.structured.reasoning import Reasoning

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

CPU_S_BASE = 0.5
CPU_S_PER_TOKEN = 0.005
"""Limit on the CPU time of bitmasks and matching for one output. Usual grammars need tens of microseconds per token;
the cost of an ambiguous one grows with the cube of the output's length, and it would stall all other requests."""


class GrammarPhase(IntEnum):
    START = 0
    REASONING = 1
    CONTENT = 2


class GrammarState:
    """
    Args:
        grammar: the compiled grammar.
        reasoning: the think block that may come before the grammar, if any.
        eos_token_ids: tokens that end the output where the grammar may end.
    """

    def __init__(
        self, grammar: CompiledGrammar, reasoning: Reasoning | None, eos_token_ids: Collection[int]
    ) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar)
        self._reasoning = reasoning
        self._eos_token_ids = list(eos_token_ids)
        self._phase = GrammarPhase.CONTENT
        if reasoning is not None:
            self._phase = GrammarPhase.REASONING if reasoning.is_open else GrammarPhase.START
        self._thoughts: list[int] = []
        """Tokens matched so far of the block's opening, or the last tokens of the block, as many as its end has."""
        self._trail: list[tuple[GrammarPhase, list[int]]] = []
        """`_phase` and `_thoughts` before each accepted token, for `rollback`."""
        self._cpu_s = self._reported_cpu_s = 0.0

    @property
    def phase(self) -> GrammarPhase:
        return self._phase

    @property
    def num_tokens(self) -> int:
        """Number of accepted tokens."""
        return len(self._trail)

    @property
    def is_terminated(self) -> bool:
        """Whether the end of the output has been accepted."""
        return self._phase is GrammarPhase.CONTENT and self._matcher.is_terminated()

    @property
    def is_too_slow(self) -> bool:
        """Whether this output has used more CPU time than its length allows."""
        return self._cpu_s > CPU_S_BASE + CPU_S_PER_TOKEN * len(self._trail)

    def take_cpu_s(self) -> float:
        """Return the CPU time in seconds since the last call."""
        taken, self._reported_cpu_s = self._cpu_s - self._reported_cpu_s, self._cpu_s
        return taken

    def accept(self, token_id: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if the token is not allowed here."""
        started = time.thread_time()
        before = self._phase, self._thoughts
        is_accepted = self._advance(token_id)
        if is_accepted:
            self._trail.append(before)
        self._cpu_s += time.thread_time() - started
        return is_accepted

    def _advance(self, token_id: int) -> bool:
        if self._phase is GrammarPhase.CONTENT:
            return self._matcher.accept_token(token_id)
        assert self._reasoning is not None
        if self._phase is GrammarPhase.START and not self._continues_start(token_id):
            if self._thoughts or not self._matcher.accept_token(token_id):
                return False
            self._phase = GrammarPhase.CONTENT
            return True
        if token_id in self._eos_token_ids:
            return False
        if self._phase is GrammarPhase.START:
            self._thoughts = [*self._thoughts, token_id]
            if len(self._thoughts) == len(self._reasoning.start_ids):
                self._phase, self._thoughts = GrammarPhase.REASONING, []
            return True
        end = self._reasoning.end_ids
        self._thoughts = [*self._thoughts, token_id][-len(end) :]
        if tuple(self._thoughts) == end:
            self._phase, self._thoughts = GrammarPhase.CONTENT, []
        return True

    def _continues_start(self, token_id: int) -> bool:
        assert self._reasoning is not None
        return token_id == self._reasoning.start_ids[len(self._thoughts)]

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        for _ in range(count):
            before = self._trail.pop()
            if self._phase is GrammarPhase.CONTENT and before[0] is not GrammarPhase.REASONING:
                self._matcher.rollback(1)
            self._phase, self._thoughts = before

    def fill(self, bitmask: NDArray[np.int32], row: int) -> None:
        """Write the allowed next tokens into a row of the bitmask.

        Args:
            bitmask: int32 [rows, ceil(vocab_size / 32)]; token t is allowed if bit t % 32 of word t // 32 is set.
        """
        started = time.thread_time()
        if self._phase is GrammarPhase.REASONING:
            bitmask[row] = -1
            for token_id in self._eos_token_ids:
                _set_bit(bitmask[row], token_id, False)
        elif self._thoughts or self._matcher.is_terminated():
            bitmask[row] = 0
        else:
            bitmask[row] = -1
            self._matcher.fill_next_token_bitmask(bitmask, row)
        if self._phase is GrammarPhase.START:
            assert self._reasoning is not None
            _set_bit(bitmask[row], self._reasoning.start_ids[len(self._thoughts)], True)
        self._cpu_s += time.thread_time() - started


def _set_bit(words: NDArray[np.int32], token_id: int, value: bool) -> None:
    bits = words.view(np.uint32)
    flag = np.uint32(1 << (token_id & 31))
    bits[token_id >> 5] = bits[token_id >> 5] | flag if value else bits[token_id >> 5] & ~flag

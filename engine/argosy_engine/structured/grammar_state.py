"""Grammar state: the position of an output in its grammar, and in the reasoning before it; and what its steps may cost.

A reasoning model thinks before the grammar begins. An output has three phases, distinguished by token ids only:

    start       the first tokens open a think block, or the first token is the grammar's first
    reasoning   any token but EOS, up to the tokens of `</think>`
    content     tokens that the grammar allows; EOS only where the grammar may end

A step of a grammar matcher is native code that cannot be interrupted, and for some grammars it takes seconds.
`BoundedThread` runs such calls in a thread that is abandoned if one takes too long, and `StepCosts` decides which
requests fail when the grammars of one step take too long together, because all streams wait for them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar


class Reasoning(Struct, frozen=True, array_like=True):
    """Markers of a think block, for a prompt after which the model may think."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_open: bool = False
    """Whether the prompt has already opened the block."""


def last_index(token_ids: Sequence[int], mark: Sequence[int]) -> int:
    """Return the index at which a mark begins for the last time; -1 if it does not occur."""
    size, mark = len(mark), list(mark)
    starts = range(len(token_ids) - size, -1, -1)
    return next((i for i in starts if token_ids[i] == mark[0] and list(token_ids[i : i + size]) == mark), -1)


def reasoning_after(
    prompt: str, start: str, end: str, start_ids: list[int], end_ids: list[int]
) -> Reasoning | None:
    """Return the markers of the think block that may follow a prompt, or None if the prompt rules it out.

    Templates open the block for models that always think, and close an empty block if thinking is off. Only the end of
    the prompt is examined, so that markers in a user's text have no effect.
    """
    prompt = prompt[-256:].rstrip()
    if prompt.endswith(end):
        return None
    return Reasoning(tuple(start_ids), tuple(end_ids), prompt.endswith(start))


def reasoning_in(
    message: str, start: str, end: str, start_ids: list[int], end_ids: list[int]
) -> Reasoning | None:
    """Return the markers of the think block that a message, which is to be continued, has begun and not closed; None
    otherwise, because the model does not think in the middle of an answer."""
    if not message.lstrip().startswith(start) or end in message:
        return None
    return Reasoning(tuple(start_ids), tuple(end_ids), is_open=True)


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


_MIN_WAIT_S = 0.01
_NICENESS = 19
_LEAST_SHARE = 0.1
"""Smallest share of the limit, for calls after several abandoned ones in the same run."""


class TookTooLong(Exception):
    """A call has used more CPU time than its limit and was abandoned; it may still be running."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__(f"more than {cpu_s:g} s of CPU time")
        self.cpu_s = cpu_s


class TooManyStuck(Exception):
    """A call was not made, because too many threads are stuck in abandoned calls."""


class BoundedThread:
    """Thread for native calls with a CPU time limit. Only one thread at a time may use it.

    The native code releases the GIL, so the caller can continue without the thread that is stuck in it. The limit
    applies to the thread's own CPU time, so that a busy machine does not make calls fail.

    Args:
        cpu_s: CPU time that a call may use. It is halved after each abandoned call of the same run, down to
            `_LEAST_SHARE`, because the caller waits for all of them.
        max_given_up: maximum number of stuck threads. While there are so many, no call is made, because it might get
            stuck too.
    """

    def __init__(self, cpu_s: float, max_given_up: int = 64) -> None:
        self._cpu_s = cpu_s
        self._max_given_up = max_given_up
        self._worker: _Worker | None = None
        self._given_up: list[_Worker] = []

    @property
    def num_given_up(self) -> int:
        """Number of threads that are still stuck in abandoned calls."""
        self._given_up = [worker for worker in self._given_up if worker.is_alive]
        return len(self._given_up)

    def run(
        self, calls: Sequence[Callable[[], object]], on_given_up: Callable[[int], None] = lambda index: None
    ) -> dict[int, Exception]:
        """Make the calls in order and return the exceptions that they raised, by index.

        A call that was abandoned has `TookTooLong`, one that was not made `TooManyStuck`. An abandoned call may still
        write to its data, which must therefore not be used again; `on_given_up(index)` is called before the next call,
        so that the caller can replace it.
        """
        errors: dict[int, Exception] = {}
        start, cpu_s = 0, self._cpu_s
        while start < len(calls):
            if self._given_up and self.num_given_up >= self._max_given_up:
                errors |= {index: TooManyStuck() for index in range(start, len(calls))}
                break
            batch = _Batch(calls, start, errors)
            worker = self._worker or self._start()
            if worker is None:  # the system has no more threads
                batch.run()
                break
            worker.begin(batch)
            overdue = worker.wait(batch, cpu_s)
            if overdue is None:
                break
            worker.give_up()
            self._given_up.append(worker)
            self._worker = None
            errors[overdue] = TookTooLong(cpu_s)
            cpu_s = max(cpu_s / 2, _LEAST_SHARE * self._cpu_s)
            on_given_up(overdue)
            start = overdue + 1
        return errors

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _start(self) -> _Worker | None:
        try:
            self._worker = _Worker()
        except RuntimeError:
            return None
        return self._worker


class _Batch:
    """Calls from `index` on. The lock decides whether a call ended before it was abandoned."""

    def __init__(
        self, calls: Sequence[Callable[[], object]], start: int, errors: dict[int, Exception]
    ) -> None:
        self.lock = threading.Lock()
        self.index = start
        self.call_began_cpu_s = 0.0
        self.is_given_up = False
        self._calls = calls
        self._errors = errors

    def run(self) -> None:
        while self.index < len(self._calls):
            error = None
            try:
                self._calls[self.index]()
            except Exception as raised:
                error = raised
            with self.lock:
                if self.is_given_up:
                    return
                if error is not None:
                    self._errors[self.index] = error
                self.index += 1
                self.call_began_cpu_s = time.thread_time()

    @property
    def is_done(self) -> bool:
        return self.index >= len(self._calls)


class _Worker:
    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="grammar steps")
        self._thread.start()
        self._clock = time.pthread_getcpuclockid(self._thread.ident or 0)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, batch: _Batch) -> None:
        batch.call_began_cpu_s = time.clock_gettime(self._clock)
        self._inbox.put(batch)

    def wait(self, batch: _Batch, cpu_s: float) -> int | None:
        """Wait until the batch is done (None) or a call has used up its CPU time (its index)."""
        wait_s = cpu_s
        while True:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=wait_s)
                return None
            with batch.lock:
                if batch.is_done:
                    wait_s = _MIN_WAIT_S
                    continue
                left_s = cpu_s - (time.clock_gettime(self._clock) - batch.call_began_cpu_s)
                if left_s <= 0.0:
                    batch.is_given_up = True
                    return batch.index
            wait_s = max(left_s, _MIN_WAIT_S)

    def give_up(self) -> None:
        """Lower the thread's priority, and let it end when its call returns."""
        self.end()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, _NICENESS)

    def end(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while (batch := self._inbox.get()) is not None:
            batch.run()
            self._ended.put(None)


MAX_TOTAL_CPU_S = 0.1
"""Limit on the CPU time of all grammars in one step: a dozen grammars that are bearable alone would together stall all
streams. Beyond the limit the most expensive request fails, one per step, until the rest fits."""
MIN_BLAMED_CPU_S = 0.01
"""CPU time that a request must have used to fail by `MAX_TOTAL_CPU_S`: no request of a large batch of usual grammars
should."""
MAX_STALL_CPU_S = 0.3
"""Limit on the CPU time of all grammars in one step that holds however little each request uses, because hundreds of
requests below `MIN_BLAMED_CPU_S` would together stall all streams for seconds. Beyond it the most expensive requests
fail at once, as many as it takes. A thousand usual grammars need a third of it."""


class StepCosts:
    """CPU time of grammars in seconds, by request id. What a request costs is known from its last step; newcomers are
    measured one by one before their first step."""

    def __init__(self) -> None:
        self._cpu_s: dict[str, float] = {}
        """Of the last step, or of the measurement before the first one."""
        self._newcomers: set[str] = set()
        """Requests that are measured, but had no step yet."""

    def add_newcomer(self, request_id: str, cpu_s: float) -> None:
        self._cpu_s[request_id] = cpu_s
        self._newcomers.add(request_id)

    def forget(self, request_id: str) -> None:
        self._cpu_s.pop(request_id, None)
        self._newcomers.discard(request_id)

    def newcomers_without_room(self, request_ids: Sequence[str]) -> Collection[str]:
        """Return the newcomers to fail because a step of these requests would take longer than `MAX_STALL_CPU_S`.

        Those that have begun are not affected, and the most expensive newcomers fail first.
        """
        newcomers = self._newcomers.intersection(request_ids) if self._newcomers else ()
        if not newcomers:
            return ()
        self._newcomers.difference_update(newcomers)
        left_s = sum(self._cpu_s.get(request_id, 0.0) for request_id in request_ids)
        refused = set[str]()
        for request_id in sorted(newcomers, key=self._cpu_s.__getitem__, reverse=True):
            if left_s <= MAX_STALL_CPU_S:
                break
            refused.add(request_id)
            left_s -= self._cpu_s[request_id]
        return refused

    def too_slow_together(self, costs: Mapping[str, float]) -> list[str]:
        """Take note of the costs of a step; return the requests to fail because of their sum, nearly always none."""
        self._cpu_s |= costs
        left_s = sum(costs.values())
        if left_s <= MAX_TOTAL_CPU_S:
            return []
        failed: list[str] = []
        for request_id, cost_s in sorted(costs.items(), key=lambda item: item[1], reverse=True):
            is_blamed = not failed and cost_s >= MIN_BLAMED_CPU_S
            if not is_blamed and left_s <= MAX_STALL_CPU_S:
                break
            failed.append(request_id)
            left_s -= cost_s
        return failed

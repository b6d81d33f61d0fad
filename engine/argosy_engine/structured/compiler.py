"""GrammarCompiler: specs to compiled grammars, off the hot path, with a deadline and a bounded cache.

Compilation is native code that releases the GIL and cannot be interrupted. What can be done about that inside a
process: requests are bounded before they get here (`params`, `json_schema`, `pattern`), compile threads run at a lower
priority than the engine's, each compilation has a deadline after which its request fails, and a thread that is past
its deadline no longer counts as one of the pool; `MAX_OVERDUE` such threads are left alone, then new grammars are
refused until one of them ends. What cannot: take a core or memory back from an overdue thread, or survive a crash of
the native code.

The first compilation imports the native code, in its thread: engines that never use it do not pay for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from argosy_engine.structured.params import GrammarSpec

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

logger = logging.getLogger("argosy.structured")

DEADLINE_S = 30.0
"""Usual schemas take milliseconds to a second; the most that a schema
of a large tool catalogue needs with a vocabulary of 150k tokens is about ten."""
MAX_OVERDUE = 4
"""Threads past their deadline that are waited for no longer; more would leave the engine no cores."""
MAX_QUEUED = 1024
_MAX_EXPIRED = 256
_NICENESS = 10


class NoGrammar(NamedTuple):
    """Why there is no grammar."""

    reason: str
    is_overload: bool = False
    """Whether the grammar may well compile later."""


_TOO_MANY = NoGrammar("too many grammars are taking too long to compile", is_overload=True)
_QUEUE_FULL = NoGrammar("too many grammars are waiting to be compiled", is_overload=True)
_CLOSED = NoGrammar("the engine is shutting down", is_overload=True)

Done = Callable[["CompiledGrammar | NoGrammar"], None]
"""Called once, from a thread of the compiler: the grammar, or why there is none."""


class Backend(Protocol):
    """What compiles; called from several threads."""

    def prepare(self) -> None:
        """Imports and builds what every compilation needs; its time counts against no grammar."""
        ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises RuntimeError or ValueError with what is wrong with the grammar."""
        ...


class _Job:
    __slots__ = ("done", "is_over", "spec", "started")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.done: list[Done] = []
        self.started = 0.0
        """time.monotonic(); 0.0 while it waits."""
        self.is_over = False


class GrammarCompiler:
    """Thread-safe. Equal specs that are asked for at the same time are compiled once.

    Args:
        num_threads: compilations at once.
        deadline_s: seconds from the start of a compilation to its failure.
        cache_bytes: bound on the compiled grammars kept for later requests.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_threads: int,
        deadline_s: float = DEADLINE_S,
        cache_bytes: int = 256 << 20,
    ) -> None:
        self.deadline_s = deadline_s
        self.cache_bytes = cache_bytes
        self._backend = backend
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[GrammarSpec, _Job] = {}
        """Waiting or running, and not overdue."""
        self._expired: OrderedDict[GrammarSpec, None] = OrderedDict()
        """The last specs that missed their deadline; another try would cost another thread."""
        self._num_workers = 0
        self._num_idle = 0
        self._num_overdue = 0
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        self._cache: OrderedDict[GrammarSpec, tuple[CompiledGrammar, int]] = OrderedDict()
        self.cached_bytes = 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def num_overdue(self) -> int:
        """Threads that still compile what nobody waits for any more."""
        return self._num_overdue

    def submit(self, spec: GrammarSpec, done: Done) -> CompiledGrammar | None:
        """The grammar if it is in the cache; else None, and `done` is called when it is there or cannot be."""
        with self._changed:
            entry = self._cache.get(spec)
            if entry is not None:
                self._cache.move_to_end(spec)
                return entry[0]
            refusal = self._refusal(spec)
            if refusal is None:
                job = self._jobs.get(spec)
                if job is None:
                    job = self._jobs[spec] = _Job(spec)
                    self._queue.append(job)
                    self._start_threads()
                    self._changed.notify_all()
                job.done.append(done)
        if refusal is not None:
            done(refusal)
        return None

    def close(self) -> None:
        """Ends the idle threads; whoever waits for a grammar is told that there will be none."""
        with self._changed:
            self._is_closed = True
            jobs, self._jobs = list(self._jobs.values()), {}
            self._queue.clear()
            for job in jobs:
                job.is_over = True
            self._changed.notify_all()
        for job in jobs:
            _answer(job, _CLOSED)

    def _refusal(self, spec: GrammarSpec) -> NoGrammar | None:
        if self._is_closed:
            return _CLOSED
        if spec in self._jobs:
            return None
        if spec in self._expired:
            return self._expiry
        if self._num_overdue >= MAX_OVERDUE:
            return _TOO_MANY
        if len(self._queue) >= MAX_QUEUED:
            return _QUEUE_FULL
        return None

    @property
    def _expiry(self) -> NoGrammar:
        return NoGrammar(f"the grammar did not compile within {self.deadline_s:g} s; make it simpler")

    def _start_threads(self) -> None:
        if self._num_idle < len(self._queue) and self._num_workers < self._num_threads:
            self._num_workers += 1
            threading.Thread(target=self._work, daemon=True, name="grammar compiler").start()
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="grammar deadlines")
            self._watcher.start()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux, of this thread only
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if self._is_closed:
                    return
                job = self._queue.popleft()
            if not self._run(job):
                return

    def _run(self, job: _Job) -> bool:
        """Compiles; False when it took so long that the pool has given this thread up."""
        result: CompiledGrammar | NoGrammar
        try:
            self._backend.prepare()
            with self._changed:
                job.started = time.monotonic()
                self._changed.notify_all()
            result = self._backend.compile(job.spec)
        except (RuntimeError, ValueError, TypeError) as error:
            result = NoGrammar(f"the grammar does not compile: {_reason(error)}")
        except Exception as error:
            logger.exception("compiling a grammar failed")
            result = NoGrammar(f"structured outputs are not available: {error}")
        with self._changed:
            if not isinstance(result, NoGrammar):
                self._remember(job.spec, result)
                self._expired.pop(job.spec, None)
            if job.is_over:
                if not self._is_closed:
                    self._num_overdue -= 1
                return False
            job.is_over = True
            self._jobs.pop(job.spec, None)
        _answer(job, result)
        return True

    def _watch(self) -> None:
        """Fails jobs at their deadline and lets the pool replace their threads."""
        while True:
            with self._changed:
                running = [job for job in self._jobs.values() if job.started]
                if self._is_closed:
                    return
                now = time.monotonic()
                expired = [job for job in running if now >= job.started + self.deadline_s]
                for job in expired:
                    self._give_up(job)
                stranded = [] if self._num_workers or not expired else list(self._queue)
                for job in stranded:
                    self._queue.remove(job)
                    del self._jobs[job.spec]
                if not expired:
                    next_s = min((job.started + self.deadline_s - now for job in running), default=None)
                    self._changed.wait(next_s)
            for job in expired:
                logger.warning("a grammar of %d bytes did not compile in time", len(job.spec.text))
                _answer(job, self._expiry)
            for job in stranded:
                _answer(job, _TOO_MANY)

    def _give_up(self, job: _Job) -> None:
        """The job's thread no longer belongs to the pool; another one may take its place."""
        job.is_over = True
        del self._jobs[job.spec]
        self._expired[job.spec] = None
        if len(self._expired) > _MAX_EXPIRED:
            self._expired.popitem(last=False)
        self._num_overdue += 1
        self._num_workers -= 1
        if self._queue and self._num_overdue < MAX_OVERDUE:
            self._start_threads()

    def _remember(self, spec: GrammarSpec, grammar: CompiledGrammar) -> None:
        """Least recently used first out. A grammar larger than the whole cache is not kept."""
        size = int(grammar.memory_size_bytes) + len(spec.text)
        if spec in self._cache or size > self.cache_bytes:
            return
        self._cache[spec] = grammar, size
        self.cached_bytes += size
        while self.cached_bytes > self.cache_bytes:
            _, (_, old) = self._cache.popitem(last=False)
            self.cached_bytes -= old


def _answer(job: _Job, result: CompiledGrammar | NoGrammar) -> None:
    for done in job.done:
        done(result)


def _reason(error: Exception) -> str:
    """The message without the place in the native source that precedes it."""
    text = str(error).strip()
    _, separator, rest = text.partition(": ")
    return (rest if separator and text.startswith("[") else text)[:500]

"""GrammarCompiler: specs to compiled grammars, off the hot path, with deadlines, fair shares and a bounded cache.

Each compilation has a thread of its own, which waits for a backend that can be killed. What keeps requests with
grammars from starving each other:

- A request is answered at its deadline at the latest, counted from its submission: whatever the reason that it still
  waits, be it the queue, the start of the backend or the compilation itself.
- A compilation that nobody waits for any more is dropped, or killed if it runs.
- Keys take turns, and each may queue a part of the whole queue only. The key is the tenant that the router names, which
  no client can choose (`headers.TENANT`); requests without one share a key.
- A compilation that requests of several keys wait for belongs to each of them: it is begun at the first turn of any,
  goes on while one of them waits, and is counted for the key that has the fewest.
- A compilation that takes longer than `QUANTUM_S` gives its slot to the next and goes on at a lower priority, beside
  a few others like it (`MIN_LONG`); beyond them the key that has most of them loses its newest one.
- A failure, of a thread's start too, costs the requests that wait for this grammar, nobody else.

Knows neither XGrammar nor processes. Time comes from `clock` and passes in `tick`, which its owner calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from argosy_engine.structured.fair_queue import FairQueue
from argosy_engine.structured.params import GrammarSpec

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

logger = logging.getLogger("argosy.structured")

DEADLINE_S = 30.0
"""From submission to the answer. Usual schemas take milliseconds to a second; the most that a schema of a large tool
catalogue needs with a vocabulary of 150k tokens is about ten."""
QUANTUM_S = 1.0
"""How long a compilation keeps its slot. Nearly all are done within it."""
MIN_LONG = 4
"""Compilations without a slot, where there are fewer slots. Each may take memory (`grammar_process.MAX_MEMORY_BYTES`)
and a part of a core."""
TICK_S = 0.1
"""How exactly deadlines are kept; `tick` does nothing more often than that."""
MAX_QUEUED = 1024
MAX_QUEUED_PER_KEY = 256
_MAX_EXPIRED = 256
EXPIRED_S = 300.0
"""How long a grammar that did not compile in time is refused without another try. The reason may have been a machine
that was busy, or a compiler that was still being started."""


class NoGrammar(NamedTuple):
    """Why there is no grammar."""

    reason: str
    is_overload: bool = False
    """Whether the grammar may well compile later."""


_TOO_MANY = NoGrammar("too many grammars are taking too long to compile", is_overload=True)
_QUEUE_FULL = NoGrammar("too many grammars are waiting to be compiled", is_overload=True)
_CLOSED = NoGrammar("the engine is shutting down", is_overload=True)

Done = Callable[["CompiledGrammar | NoGrammar"], None]
"""Called once, from any thread: the grammar, or why there is none."""


class BackendUnavailable(Exception):
    """The backend could not work on a grammar, which may be a good one."""


class Compilation(Protocol):
    def run(self, spec: GrammarSpec) -> CompiledGrammar:
        """Blocks; called once, in a thread of its own.

        Raises:
            RuntimeError, ValueError, TypeError: what is wrong with the grammar.
            BackendUnavailable: a later try may succeed.
        """
        ...

    def kill(self) -> None:
        """Ends it at once, before or while it runs: `run` raises. Called from any thread; never blocks."""
        ...

    def lower_priority(self) -> None:
        """Never blocks."""
        ...


class Backend(Protocol):
    def new_compilation(self) -> Compilation:
        """Never blocks for long.

        Raises:
            OSError, RuntimeError: what it needs cannot be had now.
        """
        ...

    def close(self) -> None: ...


def start_thread(target: Callable[[], None]) -> None:
    """Raises RuntimeError if the system has no more threads."""
    threading.Thread(target=target, daemon=True, name="grammar compiler").start()


class _Waiter(NamedTuple):
    done: Done
    deadline: float
    key: str


class _Job:
    __slots__ = ("compilation", "is_long", "is_over", "keys", "spec", "started_at", "waiters")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.waiters: dict[str, _Waiter] = {}
        """By request id."""
        self.keys: Counter[str] = Counter()
        """The keys it belongs to, with the number of their requests. Until it starts it is in the queue of each."""
        self.compilation: Compilation | None = None
        self.started_at: float | None = None
        self.is_long = False
        """Whether it has given its slot away."""
        self.is_over = False


class GrammarCompiler:
    """Thread-safe. Equal specs that are asked for at the same time are compiled once.

    Args:
        num_threads: compilations at once, and `MIN_LONG` or again as many that take long.
        deadline_s: seconds from the submission of a request to its answer.
        cache_bytes: bound on the compiled grammars kept for later requests.
        clock: monotonic seconds.
        start_thread: runs a function in a thread of its own, or raises RuntimeError.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_threads: int,
        deadline_s: float = DEADLINE_S,
        cache_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        start_thread: Callable[[Callable[[], None]], None] = start_thread,
    ) -> None:
        self.deadline_s = deadline_s
        self.cache_bytes = cache_bytes
        self._backend = backend
        self._num_threads = num_threads
        self._clock = clock
        self._start_thread = start_thread
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job] = FairQueue()
        self._jobs: dict[GrammarSpec, _Job] = {}
        """Waiting or running."""
        self._job_of: dict[str, _Job] = {}
        """By the id of a request that waits for it."""
        self._num_quick = 0
        self._long: list[_Job] = []
        """Oldest first."""
        self._expired: OrderedDict[GrammarSpec, float] = OrderedDict()
        """The last specs that did not compile within the deadline, and until when another try would take as long."""
        self._next_tick = 0.0
        self._is_closed = False
        self._cache: OrderedDict[GrammarSpec, tuple[CompiledGrammar, int]] = OrderedDict()
        self.cached_bytes = 0

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    @property
    def num_running(self) -> int:
        return self._num_quick + len(self._long)

    @property
    def num_queued(self) -> int:
        return len(self._jobs) - self.num_running

    def submit(self, request_id: str, spec: GrammarSpec, done: Done, key: str = "") -> CompiledGrammar | None:
        """The grammar if it is in the cache; else None, and `done` is called when it is there or cannot be.

        Args:
            key: whose request this is; see the module.
        """
        with self._lock:
            entry = self._cache.get(spec)
            if entry is not None:
                self._cache.move_to_end(spec)
                return entry[0]
            refusal = self._refusal(spec, key)
            answers: list[tuple[Done, CompiledGrammar | NoGrammar]]
            if refusal is not None:
                answers = [(done, refusal)]
            else:
                job = self._jobs.get(spec)
                if job is None:
                    job = self._jobs[spec] = _Job(spec)
                self._join(job, request_id, _Waiter(done, self._clock() + self.deadline_s, key))
                answers = self._dispatch()
        _answer(answers)
        return None

    def cancel(self, request_id: str) -> None:
        """The request no longer waits, and gets no answer; unknown ids are fine."""
        with self._lock:
            job = self._job_of.pop(request_id, None)
            if job is None:
                return
            self._leave(job, request_id)
            if not job.waiters:
                self._drop(job)
            answers = self._dispatch()
        _answer(answers)

    def tick(self) -> None:
        """Answers requests that are past their deadline, and takes the slots of compilations that take long."""
        if not self._jobs or self._clock() < self._next_tick:
            return
        with self._lock:
            now = self._clock()
            self._next_tick = now + TICK_S
            answers: list[tuple[Done, CompiledGrammar | NoGrammar]] = []
            for job in list(self._jobs.values()):
                answers += self._expire(job, now)
            for job in list(self._jobs.values()):
                is_quick = job.started_at is not None and not job.is_long
                if is_quick and job.started_at is not None and now >= job.started_at + QUANTUM_S:
                    self._take_slot(job)
            while len(self._long) > max(MIN_LONG, self._num_threads):
                answers += self._end(self._newest_of_the_greediest(), _TOO_MANY)
            answers += self._dispatch()
        _answer(answers)

    def close(self) -> None:
        """Ends all compilations; whoever waits for a grammar is told that there will be none."""
        with self._lock:
            self._is_closed = True
            answers = []
            for job in list(self._jobs.values()):
                answers += self._end(job, _CLOSED)
            self._queue.clear()
        _answer(answers)
        self._backend.close()

    def _refusal(self, spec: GrammarSpec, key: str) -> NoGrammar | None:
        if self._is_closed:
            return _CLOSED
        job = self._jobs.get(spec)
        if job is not None and (job.started_at is not None or key in job.keys):
            return None
        if job is None and spec in self._expired:
            if self._clock() < self._expired[spec]:
                return self._expiry
            del self._expired[spec]
        is_full = job is None and self.num_queued >= MAX_QUEUED
        return _QUEUE_FULL if is_full or self._queue.count(key) >= MAX_QUEUED_PER_KEY else None

    def _join(self, job: _Job, request_id: str, waiter: _Waiter) -> None:
        if job.started_at is None and waiter.key not in job.keys:
            self._queue.push(waiter.key, job)
        job.keys[waiter.key] += 1
        job.waiters[request_id] = waiter
        self._job_of[request_id] = job

    def _leave(self, job: _Job, request_id: str) -> Done:
        """Takes a request out of the books; a job that nobody waits for is the caller's to drop."""
        done, _, key = job.waiters.pop(request_id)
        self._job_of.pop(request_id, None)
        job.keys[key] -= 1
        if not job.keys[key]:
            del job.keys[key]
            if job.started_at is None:
                self._queue.remove(key, job)
        return done

    @property
    def _expiry(self) -> NoGrammar:
        return NoGrammar(f"the grammar did not compile within {self.deadline_s:g} s; make it simpler")

    def _dispatch(self) -> list[tuple[Done, CompiledGrammar | NoGrammar]]:
        """Starts what there are slots for; the answers of what could not be started."""
        answers = []
        while self._num_quick < self._num_threads and not self._is_closed:
            turn = self._queue.pop()
            if turn is None:
                break
            key, job = turn
            for other in job.keys.keys() - {key}:
                self._queue.remove(other, job)
            job.started_at = self._clock()
            self._num_quick += 1
            try:
                job.compilation = self._backend.new_compilation()
                self._start_thread(lambda job=job: self._run(job))
            except Exception as error:
                logger.exception("compiling a grammar could not be started")
                reason = f"structured outputs are not available: {error}"
                answers += self._end(job, NoGrammar(reason, is_overload=True))
        return answers

    def _run(self, job: _Job) -> None:
        """The thread of one compilation."""
        assert job.compilation is not None
        result: CompiledGrammar | NoGrammar
        try:
            result = job.compilation.run(job.spec)
        except (RuntimeError, ValueError, TypeError) as error:
            result = NoGrammar(f"the grammar does not compile: {_reason(error)}")
        except BackendUnavailable as error:
            if not job.is_over:
                logger.error("compiling a grammar failed: %s", error)
            result = NoGrammar(f"structured outputs are not available: {error}", is_overload=True)
        except Exception as error:
            logger.exception("compiling a grammar failed")
            result = NoGrammar(f"structured outputs are not available: {error}")
        with self._lock:
            if not isinstance(result, NoGrammar):
                self._remember(job.spec, result)
                self._expired.pop(job.spec, None)
            answers = [] if job.is_over else self._end(job, result)
            answers += self._dispatch()
        _answer(answers)

    def _end(
        self, job: _Job, result: CompiledGrammar | NoGrammar
    ) -> list[tuple[Done, CompiledGrammar | NoGrammar]]:
        """Takes a job out of the books, killing what runs; the answers to give."""
        answers: list[tuple[Done, CompiledGrammar | NoGrammar]] = [
            (self._leave(job, request_id), result) for request_id in list(job.waiters)
        ]
        self._drop(job)
        return answers

    def _drop(self, job: _Job) -> None:
        """Takes a job that nobody waits for out of the books."""
        del self._jobs[job.spec]
        job.is_over = True
        if job.is_long:
            self._long.remove(job)
        elif job.started_at is not None:
            self._num_quick -= 1
        if job.compilation is not None:
            job.compilation.kill()

    def _expire(self, job: _Job, now: float) -> list[tuple[Done, CompiledGrammar | NoGrammar]]:
        expired = [request_id for request_id, waiter in job.waiters.items() if now >= waiter.deadline]
        result = self._expiry if job.started_at is not None else _QUEUE_FULL
        answers: list[tuple[Done, CompiledGrammar | NoGrammar]] = [
            (self._leave(job, request_id), result) for request_id in expired
        ]
        if not job.waiters:
            if job.started_at is not None and now - job.started_at >= self.deadline_s / 2:
                logger.warning("a grammar of %d bytes did not compile in time", len(job.spec.text))
                self._expired[job.spec] = now + EXPIRED_S
                if len(self._expired) > _MAX_EXPIRED:
                    self._expired.popitem(last=False)
            self._drop(job)
        return answers

    def _take_slot(self, job: _Job) -> None:
        """A running job goes on beside the slots."""
        assert job.compilation is not None
        self._num_quick -= 1
        job.is_long = True
        self._long.append(job)
        job.compilation.lower_priority()

    def _newest_of_the_greediest(self) -> _Job:
        """Of those that take long, the newest of the key that has most of them. One of several keys counts for the key
        that has the fewest: who waits for a grammar of somebody greedy is not greedy."""
        counts = Counter(key for job in self._long for key in job.keys)
        payers = [min(job.keys, key=lambda key: (counts[key], key)) for job in self._long]
        counts = Counter(payers)
        most = max(counts.values())
        return next(
            job
            for job, payer in zip(reversed(self._long), reversed(payers), strict=True)
            if counts[payer] == most
        )

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


def _answer(answers: list[tuple[Done, CompiledGrammar | NoGrammar]]) -> None:
    for done, result in answers:
        done(result)


def _reason(error: Exception) -> str:
    """The message without the place in the native source that precedes it."""
    text = str(error).strip()
    _, separator, rest = text.partition(": ")
    return (rest if separator and text.startswith("[") else text)[:500]

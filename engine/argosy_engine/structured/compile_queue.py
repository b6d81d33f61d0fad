"""CompileQueue: compiles grammars off the hot path, with deadlines, fair queueing and a bounded cache.
HeldGrammars: bounds the memory of the grammars that requests hold.

Each compilation has its own thread, which waits for a backend that can be killed. These rules keep requests with
grammars from starving each other:

- A request is answered by its deadline, counted from its submission, whatever it is waiting for: the queue, the start
  of the backend or the compilation itself.
- A compilation is dropped, or killed if it runs, when no request waits for it any more.
- The most urgent requests go first, and others neither keep their place in the queue nor count for its bounds. Of
  equally urgent ones keys take turns, and each may fill only a part of the queue. The key is the tenant that the router
  names for its client (`headers.TENANT`); requests without a tenant share a key.
- A compilation for requests of several keys belongs to each of these keys: it starts at the first turn of any of them,
  continues while a request of any of them waits, and counts for the key that has the fewest long compilations.
- A compilation that takes longer than `QUANTUM_S` yields its slot and continues at a lower priority. Only a few of them
  may run (`MIN_LONG`); if there are more, the newest one of the key that has most of them is killed.
- A failure, even to start a thread, affects only the requests that wait for this grammar.

The module knows neither XGrammar nor processes. Time is read from `clock`, and the owner must call `tick` regularly.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from argosy_engine.fair_shares import TenantShares, UrgentFirst
from argosy_engine.structured.structured_outputs_params import GrammarSpec

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar


logger = logging.getLogger("argosy.structured")

DEADLINE_S = 30.0
"""Limit from submission to the answer. Usual schemas take milliseconds to a second, the schema of a large tool
catalogue with a vocabulary of 150k tokens about ten seconds."""
PATIENCE = 1.0
"""Factor of `DEADLINE_S` and of the limits in `grammar_server`, for tests on busy machines."""
QUANTUM_S = 1.0
"""How long a compilation may keep its slot. Nearly all finish within it."""
MIN_LONG = 4
"""Maximum number of long compilations beside the slots, or the number of slots if that is larger. Each may take memory
(`grammar_server.MAX_MEMORY_BYTES`) and a share of a core."""
TICK_S = 0.1
"""Precision of deadlines: `tick` does nothing if it is called more often."""
MAX_QUEUED = 1024
MAX_QUEUED_PER_KEY = 256
MAX_URGENCIES = 3
"""How many times as many a key may have queued in all: of one urgency, or more urgent, it has `MAX_QUEUED_PER_KEY`."""
MAX_QUEUED_BYTES = 256 << 20
"""As much as the cache by default. A usual schema takes 0.2 MB, 5 MB with a vocabulary of 150,000 tokens."""
MAX_HELD_BYTES = 2 << 30
"""Different grammars of the requests that wait or run: 256 that run with a usual schema and a large vocabulary have 1.3
GB."""
MAX_RESUMED = 32
"""Maximum number of grammars that are compiled again at the same time, so that they leave room in the compile queue."""
_MAX_EXPIRED = 256
EXPIRED_S = 300.0
"""How long a grammar that did not compile in time is refused without another attempt. It is not refused for ever,
because the machine may have been busy, or the compiler may have been starting."""


class Grammar(NamedTuple):
    """A compiled grammar."""

    compiled: CompiledGrammar
    num_bytes: int
    """About the memory that it takes, with its text."""


class NoGrammar(NamedTuple):
    """Reason why a grammar is not available."""

    reason: str
    is_overload: bool = False
    """Whether a later attempt may succeed."""


_TOO_MANY = NoGrammar("too many grammars are taking too long to compile", is_overload=True)
_QUEUE_FULL = NoGrammar("too many grammars are waiting to be compiled", is_overload=True)
_CLOSED = NoGrammar("the engine is shutting down", is_overload=True)

Done = Callable[[Grammar | NoGrammar], None]
"""Callback with the grammar, or the reason why there is none. Called once, from any thread."""


class BackendUnavailable(Exception):
    """Raised if the backend failed for a reason other than the grammar, which may be valid."""


class Compilation(Protocol):
    def run(self, spec: GrammarSpec) -> Grammar:
        """Compile the grammar. Blocks; called once, in a separate thread.

        Raises:
            RuntimeError, ValueError, TypeError: the grammar is invalid; the message tells why.
            BackendUnavailable: a later attempt may succeed.
        """
        ...

    def kill(self) -> None:
        """End the compilation at once, before or during `run`, which then raises. Thread-safe; never blocks."""
        ...

    def lower_priority(self) -> None:
        """Lower the compilation's priority. Never blocks."""
        ...


class Backend(Protocol):
    def new_compilation(self) -> Compilation:
        """Prepare a compilation. Never blocks for long.

        Raises:
            OSError, RuntimeError: a resource that it needs is not available now.
        """
        ...

    def warm_up(self) -> None:
        """Do what the first compilation would have to wait for. Blocks; called in a separate thread.

        Raises:
            BackendUnavailable: it failed; the first compilation will try again.
        """
        ...

    def close(self) -> None: ...


def start_thread(target: Callable[[], None]) -> None:
    """Run a function in a daemon thread. Raises RuntimeError if the system has no more threads."""
    threading.Thread(target=target, daemon=True, name="grammar compiler").start()


class _Waiter(NamedTuple):
    done: Done
    deadline: float
    place: tuple[int, str]
    """Urgency and key."""


class _Job:
    __slots__ = ("compilation", "is_long", "is_over", "places", "spec", "started_at", "waiters")

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.waiters: dict[str, _Waiter] = {}
        """Request id -> waiter."""
        self.places: Counter[tuple[int, str]] = Counter()
        """Urgency and key of its requests -> how many wait. Until it starts it is queued in each of these places."""
        self.compilation: Compilation | None = None
        self.started_at: float | None = None
        self.is_long = False
        """Whether it has yielded its slot."""
        self.is_over = False


class CompileQueue:
    """Queue and cache of compilations. Thread-safe. Equal specs that are requested at the same time are compiled once.

    Args:
        num_threads: number of slots for compilations; as many long ones, but at least `MIN_LONG`, may run beside them.
        deadline_s: seconds from the submission of a request to its answer; None: `DEADLINE_S`.
        cache_bytes: bound on the compiled grammars kept for later requests.
        clock: monotonic seconds.
        start_thread: runs a function in a new thread, or raises RuntimeError.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_threads: int,
        deadline_s: float | None = None,
        cache_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        start_thread: Callable[[Callable[[], None]], None] = start_thread,
    ) -> None:
        self.deadline_s = DEADLINE_S * PATIENCE if deadline_s is None else deadline_s
        self.cache_bytes = cache_bytes
        self._backend = backend
        self._num_threads = num_threads
        self._clock = clock
        self._start_thread = start_thread
        self._lock = threading.Lock()
        self._queue: UrgentFirst[_Job] = UrgentFirst()
        self._jobs: dict[GrammarSpec, _Job] = {}
        """Queued and running jobs."""
        self._job_of: dict[str, _Job] = {}
        """Request id -> the job that it waits for."""
        self._num_quick = 0
        """Number of running jobs that hold a slot."""
        self._long: list[_Job] = []
        """Running jobs that have yielded their slot, in the order in which they did."""
        self._expired: OrderedDict[GrammarSpec, float] = OrderedDict()
        """The last specs that did not compile within the deadline -> until when they are refused."""
        self._next_tick = 0.0
        self._is_closed = self._is_warmed_up = False
        self._cache: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
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

    def warm_up(self) -> None:
        """Let the backend prepare for the first compilation in a thread; later calls do nothing."""
        if self._is_warmed_up:
            return
        self._is_warmed_up = True
        try:
            self._start_thread(self._warm_up)
        except RuntimeError as error:
            logger.warning("compiling grammars could not be prepared: %s", error)

    def _warm_up(self) -> None:
        try:
            self._backend.warm_up()
        except BackendUnavailable as error:
            if not self._is_closed:
                logger.warning("compiling grammars could not be prepared: %s", error)

    def submit(
        self, request_id: str, spec: GrammarSpec, done: Done, key: str = "", urgency: int = 0
    ) -> Grammar | None:
        """Return the grammar if it is cached; else return None and call `done` when it is compiled or has failed.

        Args:
            key: key for fair queueing; see the module's docstring.
            urgency: lower goes first.
        """
        with self._lock:
            grammar = self._cache.get(spec)
            if grammar is not None:
                self._cache.move_to_end(spec)
                return grammar
            place = urgency, key
            refusal = self._refusal(spec, place)
            answers: list[tuple[Done, Grammar | NoGrammar]]
            if refusal is not None:
                answers = [(done, refusal)]
            else:
                job = self._jobs.get(spec)
                if job is None:
                    job = self._jobs[spec] = _Job(spec)
                self._join(job, request_id, _Waiter(done, self._clock() + self.deadline_s, place))
                answers = self._dispatch()
        _answer(answers)
        return None

    def cancel(self, request_id: str) -> None:
        """Stop waiting on behalf of a request, which gets no answer. Unknown ids are ignored."""
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
        """Answer requests that are past their deadline, and take the slots of compilations that take long."""
        if not self._jobs or self._clock() < self._next_tick:
            return
        with self._lock:
            now = self._clock()
            self._next_tick = now + TICK_S
            answers: list[tuple[Done, Grammar | NoGrammar]] = []
            for job in list(self._jobs.values()):
                answers += self._expire(job, now)
            for job in list(self._jobs.values()):
                is_quick = job.started_at is not None and not job.is_long
                if is_quick and job.started_at is not None and now >= job.started_at + QUANTUM_S:
                    self._take_slot(job)
            while len(self._long) > max(MIN_LONG, self._num_threads):
                answers += self._end(self._newest_of_largest_owner(), _TOO_MANY)
            answers += self._dispatch()
        _answer(answers)

    def close(self) -> None:
        """End all compilations and answer the requests that wait for them with a failure."""
        with self._lock:
            self._is_closed = True
            answers = []
            for job in list(self._jobs.values()):
                answers += self._end(job, _CLOSED)
            self._queue.clear()
        _answer(answers)
        self._backend.close()

    def _refusal(self, spec: GrammarSpec, place: tuple[int, str]) -> NoGrammar | None:
        if self._is_closed:
            return _CLOSED
        job = self._jobs.get(spec)
        if job is not None and (job.started_at is not None or place in job.places):
            return None
        if job is None and spec in self._expired:
            if self._clock() < self._expired[spec]:
                return self._expiry
            del self._expired[spec]
        urgency, key = place
        is_full = self._queue.count(key, urgency) >= MAX_QUEUED_PER_KEY
        if key:  # else ever more urgent ones find it empty
            is_full |= self._queue.count(key, sys.maxsize) >= MAX_URGENCIES * MAX_QUEUED_PER_KEY
        if job is None and self.num_queued >= MAX_QUEUED:
            is_full |= self._num_queued_before(urgency) >= MAX_QUEUED
        return _QUEUE_FULL if is_full else None

    def _num_queued_before(self, urgency: int) -> int:
        """Return the number of queued jobs that are as urgent or more: others keep nobody's place."""
        queued = [job for job in self._jobs.values() if job.started_at is None]
        return sum(min(job.places)[0] <= urgency for job in queued)

    def _join(self, job: _Job, request_id: str, waiter: _Waiter) -> None:
        if job.started_at is None and waiter.place not in job.places:
            self._queue.push(*waiter.place, job)
        job.places[waiter.place] += 1
        job.waiters[request_id] = waiter
        self._job_of[request_id] = job

    def _leave(self, job: _Job, request_id: str) -> Done:
        """Remove a request from its job and return its callback. The caller must drop a job without requests."""
        done, _, place = job.waiters.pop(request_id)
        self._job_of.pop(request_id, None)
        job.places[place] -= 1
        if not job.places[place]:
            del job.places[place]
            if job.started_at is None:
                self._queue.remove(*place, job)
        return done

    @property
    def _expiry(self) -> NoGrammar:
        return NoGrammar(f"the grammar did not compile within {self.deadline_s:g} s; make it simpler")

    def _dispatch(self) -> list[tuple[Done, Grammar | NoGrammar]]:
        """Start queued jobs while there are free slots; return the answers for those that could not be started."""
        answers = []
        while self._num_quick < self._num_threads and not self._is_closed:
            turn = next(self._queue.firsts(), None)
            if turn is None:
                break
            urgency, key, job = turn
            self._queue.pop(urgency, key)
            for other in job.places.keys() - {(urgency, key)}:
                self._queue.remove(*other, job)
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
        """Run one compilation in its thread and answer the requests that wait for it."""
        assert job.compilation is not None
        result: Grammar | NoGrammar
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

    def _end(self, job: _Job, result: Grammar | NoGrammar) -> list[tuple[Done, Grammar | NoGrammar]]:
        """Remove a job, killing its compilation; return the answers to give."""
        answers: list[tuple[Done, Grammar | NoGrammar]] = [
            (self._leave(job, request_id), result) for request_id in list(job.waiters)
        ]
        self._drop(job)
        return answers

    def _drop(self, job: _Job) -> None:
        """Remove a job that no request waits for, and kill its compilation."""
        del self._jobs[job.spec]
        job.is_over = True
        if job.is_long:
            self._long.remove(job)
        elif job.started_at is not None:
            self._num_quick -= 1
        if job.compilation is not None:
            job.compilation.kill()

    def _expire(self, job: _Job, now: float) -> list[tuple[Done, Grammar | NoGrammar]]:
        expired = [request_id for request_id, waiter in job.waiters.items() if now >= waiter.deadline]
        result = self._expiry if job.started_at is not None else _QUEUE_FULL
        answers: list[tuple[Done, Grammar | NoGrammar]] = [
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
        """Let a running job continue without a slot, at a lower priority."""
        assert job.compilation is not None
        self._num_quick -= 1
        job.is_long = True
        self._long.append(job)
        job.compilation.lower_priority()

    def _newest_of_largest_owner(self) -> _Job:
        """Return the newest long job of the key that has most of them.

        A job of several keys counts for the key that has the fewest, so that no key is charged for waiting for the same
        grammar as a greedy one.
        """
        keys = [{key for _, key in job.places} for job in self._long]
        counts = Counter(key for each in keys for key in each)
        payers = [min(each, key=lambda key: (counts[key], key)) for each in keys]
        counts = Counter(payers)
        most = max(counts.values())
        return next(
            job
            for job, payer in zip(reversed(self._long), reversed(payers), strict=True)
            if counts[payer] == most
        )

    def _remember(self, spec: GrammarSpec, grammar: Grammar) -> None:
        """Put a grammar into the LRU cache. A grammar that is larger than the whole cache is not kept."""
        if spec in self._cache or grammar.num_bytes > self.cache_bytes:
            return
        self._cache[spec] = grammar
        self.cached_bytes += grammar.num_bytes
        while self.cached_bytes > self.cache_bytes:
            self.cached_bytes -= self._cache.popitem(last=False)[1].num_bytes


def _answer(answers: list[tuple[Done, Grammar | NoGrammar]]) -> None:
    for done, result in answers:
        done(result)


def _reason(error: Exception) -> str:
    """Return the error's message without the leading position in the native source."""
    text = str(error).strip()
    _, separator, rest = text.partition(": ")
    return (rest if separator and text.startswith("[") else text)[:500]


class _Hold(NamedTuple):
    """A grammar that a request holds, or wants to hold."""

    key: str
    """Tenant."""
    spec: GrammarSpec
    num_bytes: int
    urgency: int


class _Holders:
    """Requests that hold grammars. Equal ones count once, for the tenant of the first request that still holds one.

    Invariant: `bytes` has the sum over the different grammars.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = TenantShares(max_bytes)
        self.holds: dict[str, _Hold] = {}
        self._of_spec: dict[GrammarSpec, OrderedDict[str, _Hold]] = {}
        """The same ones, of which the first of each grammar counts."""

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._of_spec

    def has_room(self, wanted: _Hold) -> bool:
        """Whether a grammar may be held. One alone may be of any size."""
        return wanted.spec in self or not self.holds or not self.bytes.is_full(wanted.num_bytes)

    def exceeds_share(self, wanted: _Hold) -> bool:
        return wanted.spec not in self and self.bytes.exceeds_share(wanted.key, wanted.num_bytes)

    def add(self, request_id: str, hold: _Hold) -> None:
        self.holds[request_id] = hold
        if hold.spec not in self:
            self._of_spec[hold.spec] = OrderedDict()
            self.bytes.add(hold.key, hold.num_bytes)
        self._of_spec[hold.spec][request_id] = hold

    def remove(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        hold = self.holds.pop(request_id, None)
        if hold is None:
            return
        holders = self._of_spec[hold.spec]
        was_counted = next(iter(holders)) == request_id
        del holders[request_id]
        if was_counted:
            self.bytes.remove(hold.key, hold.num_bytes)
            for first in holders.values():
                self.bytes.add(first.key, first.num_bytes)
                break
        if not holders:
            del self._of_spec[hold.spec]


class HeldGrammars:
    """Which requests hold their compiled grammar.

    Waiting requests may be thousands, each with a grammar of its own. Those that come first hold theirs, up to
    `MAX_QUEUED_BYTES` in all, and together with those that run up to `MAX_HELD_BYTES`, of which one tenant gets its
    share (`TenantShares`). The others keep only the text, and their grammar is compiled again once there is room for
    it. The most urgent ones go first; of equally urgent ones tenants take turns, and a large grammar is not overtaken
    by smaller ones. For a more urgent request others that wait give their grammars back (`displace`).
    """

    def __init__(self, max_waiting_bytes: int = MAX_QUEUED_BYTES, max_bytes: int = MAX_HELD_BYTES) -> None:
        self.waiting = _Holders(max_waiting_bytes)
        self.all = _Holders(max_bytes)
        self._deferred: dict[str, _Hold] = {}
        """Requests that hold none."""
        self._turns: UrgentFirst[str] = UrgentFirst()
        """The same requests, by tenant."""
        self._resumed: set[str] = set()
        """Requests that have their room, and whose grammar is compiled again."""

    def admit(self, request_id: str, key: str, spec: GrammarSpec, num_bytes: int, urgency: int = 0) -> bool:
        """Whether a request may hold its grammar, which has been compiled. If not, `resume` will return the request.

        Args:
            key: its tenant.
            urgency: its priority; lower goes first.
        """
        self._resumed.discard(request_id)
        if request_id in self.all.holds:
            return True
        wanted = _Hold(key, spec, num_bytes, urgency)
        if (
            spec not in self.waiting or self._next() is not None
        ):  # those that wait for room would wait for ever
            self._defer(request_id, wanted)
            if not self._take_next(request_id):
                return False
        self._hold(request_id, wanted)
        return True

    def resume(self) -> str | None:
        """Return a request that may hold its grammar now, whose room is taken from now on; None if there is none."""
        request_id = self._next()
        if request_id is None or len(self._resumed) >= MAX_RESUMED:
            return None
        wanted = self._deferred[request_id]
        if not self._take_next(request_id):
            return None
        self._resumed.add(request_id)
        self._hold(request_id, wanted)
        return request_id

    def displace(self) -> list[str]:
        """Return requests that must give their grammar back, because a more urgent one needs the room; `resume` will
        return them, too.

        They wait and are less urgent, and it is the newest of the least urgent ones. If all of them were not enough, it
        is none.
        """
        request_id = self._next()
        if request_id is None or self._has_room(wanted := self._deferred[request_id]):
            return []
        later = [
            (each, hold)
            for each, hold in reversed(self.waiting.holds.items())
            if hold.urgency > wanted.urgency and each not in self._resumed
        ]
        later.sort(key=lambda each: each[1].urgency, reverse=True)
        displaced: list[tuple[str, _Hold]] = []
        while later and not self._has_room(wanted):
            displaced.append(later.pop(0))
            self._let_go(displaced[-1][0])
        is_enough = self._has_room(wanted)
        for each, hold in reversed(displaced):
            (self._defer if is_enough else self._hold)(each, hold)
        return [each for each, _ in displaced] if is_enough else []

    def start(self, request_id: str) -> None:
        """Take note that a request waits no longer. Unknown ids are ignored."""
        self.waiting.remove(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request, which has ended. Unknown ids are ignored."""
        self._resumed.discard(request_id)
        wanted = self._deferred.pop(request_id, None)
        if wanted is not None:
            self._turns.remove(wanted.urgency, wanted.key, request_id)
        self._let_go(request_id)

    def _next(self) -> str | None:
        """Return the request that is to get room next."""
        for _, _, request_id in self._turns.firsts():
            if not self.all.exceeds_share(self._deferred[request_id]):
                return request_id
        return None

    def _take_next(self, request_id: str) -> bool:
        """Whether it is this request's turn and there is room, in which case it is deferred no longer."""
        wanted = self._deferred[request_id]
        if self._next() != request_id or not self._has_room(wanted):
            return False
        del self._deferred[request_id]
        self._turns.pop(wanted.urgency, wanted.key)
        return True

    def _has_room(self, wanted: _Hold) -> bool:
        return self.waiting.has_room(wanted) and self.all.has_room(wanted)

    def _defer(self, request_id: str, wanted: _Hold) -> None:
        self._deferred[request_id] = wanted
        self._turns.push(wanted.urgency, wanted.key, request_id)

    def _hold(self, request_id: str, hold: _Hold) -> None:
        for holders in (self.waiting, self.all):
            holders.add(request_id, hold)

    def _let_go(self, request_id: str) -> None:
        for holders in (self.waiting, self.all):
            holders.remove(request_id)

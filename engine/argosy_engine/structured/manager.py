"""StructuredOutputManager: compiles and follows the grammars of requests, and computes their bitmasks.

It runs in the engine core's thread, except for `_finished`, which compile threads call. It knows token ids and request
ids, but nothing of scheduling: the core asks it for bitmasks and passes it the sampled tokens. `CopiedGrammars` takes
its place in a core of which there are copies in other processes.

If something goes wrong with one request's grammar (an exception of native code, or a step that takes too long), only
that request fails, with a `GrammarFailure`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from argosy_engine.structured.compile_queue import CompileQueue, Grammar, HeldGrammars, NoGrammar
from argosy_engine.structured.grammar_server import GrammarClient, GrammarServerArgs
from argosy_engine.structured.grammar_state import (
    BoundedThread,
    GrammarState,
    Reasoning,
    StepCosts,
    TookTooLong,
    TooManyStuck,
)
from argosy_engine.structured.structured_outputs_params import GrammarSpec

logger = logging.getLogger("argosy.structured")

MAX_STEP_CPU_S = 0.1
"""Limit on the CPU time of one request's bitmask, or of matching its tokens of one step, because all other requests
wait for it. Usual grammars need tens of microseconds. Beyond the limit the call is abandoned and its request fails."""
MAX_STUCK = 4
"""Limit on threads stuck in abandoned calls. When it is reached, new grammars are refused, because they might get stuck
too, and running requests fail if a call for an equal grammar was abandoned."""
MAX_STUCK_RUNNING = 16
"""Maximum number of stuck threads, each of which may use a core at the lowest priority. From then on a request with any
grammar fails at its next step; requests without a grammar continue."""
_MAX_COMPILE_THREADS = 8
_MAX_NAMED = 16
"""Maximum number of request ids in one log line."""
REPLAY_SLICE_S = 0.02
"""Time between two engine steps for replaying the output of earlier runs into new grammars, and for measuring these."""
_REPLAY_CHUNK = 16
_NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})
_TOO_SLOW = "matching the output against this grammar takes too long; make the grammar less ambiguous"
_NOTHING_FITS = "no token satisfies the structured output together with the request's other limits"
_FAULT = "the engine could not follow this request's grammar"
_STUCK = NoGrammar("too many grammars are taking too long to match", is_overload=True)


class _NoRoom(Exception):
    """The other grammars of this step leave no time for a request's first bitmask."""


class GrammarRequest(Struct, frozen=True, array_like=True):
    """Structured output of a request, as sent to the core."""

    spec: GrammarSpec
    reasoning: Reasoning | None = None


class GrammarFailure(Struct, frozen=True):
    """Reason why a request with a grammar cannot continue."""

    reason: str
    is_overload: bool = False
    """Whether the request may succeed later."""
    is_fault: bool = False
    """Whether the engine is at fault, not the grammar."""


_TOO_SLOW_TOGETHER = GrammarFailure(
    "matching outputs against grammars takes too long, and most of the time goes to this one; "
    "retry later, or make it less ambiguous",
    is_overload=True,
)


class Compiled(Struct, frozen=True):
    """Request that no longer waits for its grammar, because it is ready or has failed; or that waits for it again."""

    request_id: str
    failure: GrammarFailure | None = None
    is_deferred: bool = False
    """Whether it had its grammar and must wait for it again, in favour of a more urgent request."""


class _Asked(NamedTuple):
    """Arguments of `StructuredOutputManager.add`."""

    request: GrammarRequest
    output: Sequence[int]
    key: str
    urgency: int


class StructuredOutputManager:
    """
    Args:
        compile_queue: compiles the grammars.
        vocab_size: number of columns of the logits.
        eos_token_ids: tokens that end an output where its grammar may end.
        wake: called from another thread when `take_compiled` has something new.
        max_step_cpu_s: see `MAX_STEP_CPU_S`.
    """

    def __init__(
        self,
        compile_queue: CompileQueue,
        vocab_size: int,
        eos_token_ids: Collection[int],
        wake: Callable[[], None] = lambda: None,
        max_step_cpu_s: float = MAX_STEP_CPU_S,
    ) -> None:
        self.compile_queue = compile_queue
        self.wake = wake
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: dict[str, _Asked] = {}
        """Requests whose grammar is being compiled."""
        self._deferred: dict[str, _Asked] = {}
        """Requests whose grammar is compiled again once `held` has room for it."""
        self._followed: dict[str, _Asked] = {}
        """Requests in `_states`."""
        self.held = HeldGrammars()
        self._states: dict[str, GrammarState] = {}
        self._done: deque[tuple[str, Grammar | NoGrammar]] = deque()
        """Results of compile threads by request id; append and popleft are atomic."""
        self._replays: deque[tuple[str, Sequence[int]]] = deque()
        """Requests whose grammar is compiled, with the tokens that it has yet to accept before its cost is measured."""
        self._costs = StepCosts()
        self._compiled = threading.Event()
        self._stuck_specs: set[GrammarSpec] = set()
        """Grammars with an abandoned call; cleared when no thread is stuck any more."""
        self._steps = BoundedThread(max_step_cpu_s, MAX_STUCK_RUNNING)
        self._bitmask = np.empty((0, self._num_words), np.int32)

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits for its grammar."""
        return bool(self._waiting or self._replays)

    @property
    def has_compiled(self) -> bool:
        return bool(self._done or self._replays)

    def __bool__(self) -> bool:
        """Whether any request has a compiled grammar."""
        return bool(self._states)

    @property
    def num_stuck(self) -> int:
        """Number of threads stuck in abandoned calls."""
        return self._steps.num_given_up

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that have a grammar or wait for one."""
        return [*self._states, *self._waiting, *self._deferred]

    def is_following(self, request_id: str) -> bool:
        """Whether the request's grammar is compiled."""
        return request_id in self._states

    def is_waiting_for(self, request_id: str) -> bool:
        """Whether `take_compiled` will still report this request."""
        return (
            request_id in self._waiting
            or request_id in self._deferred
            or any(replay[0] == request_id for replay in self._replays)
        )

    def is_deferred(self, request_id: str) -> bool:
        """Whether this request waits until others that hold their grammar have started."""
        return request_id in self._deferred

    def add(
        self,
        request_id: str,
        request: GrammarRequest,
        output: Sequence[int] = (),
        key: str = "",
        urgency: int = 0,
    ) -> None:
        """Start to compile a request's grammar; `take_compiled` will report when it is ready or has failed.

        Args:
            output: tokens of an earlier run, which the grammar must accept first.
            key: tenant, for fair shares of the compile queue and of memory.
            urgency: priority; of requests that wait, lower ones get memory first.
        """
        self._waiting[request_id] = _Asked(request, output, key, urgency)
        if self.num_stuck >= MAX_STUCK:
            self._finished(request_id, _STUCK)
            return
        done = partial(self._finished, request_id)
        try:
            grammar = self.compile_queue.submit(request_id, request.spec, done, key, urgency)
        except BaseException:
            del self._waiting[request_id]
            raise
        if grammar is not None:
            self._finished(request_id, grammar)

    def start(self, request_ids: Iterable[str]) -> None:
        """Take note of requests that got a slot, so that their grammars no longer count as queued."""
        for request_id in request_ids:
            self.held.start(request_id)
        self._resume_deferred()

    def _resume_deferred(self) -> None:
        while (request_id := self.held.resume()) is not None:
            self.add(request_id, *self._deferred.pop(request_id))

    def _displace(self) -> list[Compiled]:
        """Take grammars from less urgent requests that wait for a slot, for more urgent ones that have none."""
        displaced: list[Compiled] = []
        while request_ids := self.held.displace():
            for request_id in request_ids:
                self._deferred[request_id] = self._followed[request_id]
                self._forget_state(request_id)
                displaced.append(Compiled(request_id, is_deferred=True))
            self._resume_deferred()
        if displaced:
            self._replays = deque(each for each in self._replays if each[0] in self._states)
        return displaced

    def warm_up(self) -> None:
        """Prepare for the first grammar in the background, once. Call it while the engine is idle."""
        self.compile_queue.warm_up()

    def tick(self) -> None:
        """Check the deadlines of grammars that compile. Call it regularly, even while the engine is idle."""
        self.compile_queue.tick()

    def take_compiled(self) -> list[Compiled]:
        """Return the requests whose grammar has become ready or has failed since the last call."""
        self._compiled.clear()
        compiled = []
        while self._done:
            request_id, result = self._done.popleft()
            if request_id not in self._waiting:
                continue  # the request was aborted
            asked = self._waiting.pop(request_id)
            request = asked.request
            if isinstance(result, NoGrammar):
                self.held.release(request_id)
                compiled.append(Compiled(request_id, GrammarFailure(result.reason, result.is_overload)))
                continue
            if not self.held.admit(request_id, asked.key, request.spec, result.num_bytes, asked.urgency):
                self._deferred[request_id] = asked
                continue
            try:
                self._states[request_id] = GrammarState(
                    result.compiled, request.reasoning, self._eos_token_ids
                )
            except Exception:
                logger.exception("the grammar of request %s cannot be followed", request_id)
                self.held.release(request_id)
                compiled.append(Compiled(request_id, GrammarFailure(_FAULT, is_fault=True)))
                continue
            self._followed[request_id] = asked
            self._replays.append((request_id, asked.output))
        self._resume_deferred()
        return compiled + self._displace() + self._replay_some()

    def _replay_some(self) -> list[Compiled]:
        """Continue replays for up to `REPLAY_SLICE_S`; return the requests whose replay and measurement have ended."""
        replayed = []
        ends = time.monotonic() + REPLAY_SLICE_S
        while self._replays and time.monotonic() < ends:
            request_id, output = self._replays.popleft()
            if request_id not in self._states:
                continue  # the request was aborted
            failure = None
            if output:
                failure = self.accept({request_id: output[:_REPLAY_CHUNK]}).get(request_id)
            if failure is None and len(output) > _REPLAY_CHUNK:
                self._replays.appendleft((request_id, output[_REPLAY_CHUNK:]))
            else:
                replayed.append(Compiled(request_id, failure or self._measure(request_id)))
        return replayed

    def _measure(self, request_id: str) -> GrammarFailure | None:
        """Fill a request's first bitmask alone, so that its cost is known before it shares a step with others."""
        _, failures = self.bitmask([request_id])
        if request_id in self._states:
            self._costs.add_newcomer(request_id, self._states[request_id].take_cpu_s())
        return failures.get(request_id)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until `take_compiled` has something new, or goes on with a replay. Call it only while `is_waiting`."""
        if not self.has_compiled:
            self._compiled.wait(timeout_s)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that have ended or were aborted, and cancel their compilations."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                self.compile_queue.cancel(request_id)
            self._deferred.pop(request_id, None)
            if request_id in self._states:
                self._drop_state(request_id)
            else:
                self.held.release(request_id)
        self._resume_deferred()

    def _drop_state(self, request_id: str) -> None:
        self._forget_state(request_id)
        self.held.release(request_id)

    def _forget_state(self, request_id: str) -> None:
        del self._states[request_id], self._followed[request_id]
        self._costs.forget(request_id)

    def replay(self, request_id: str, output: Sequence[int]) -> GrammarFailure | None:
        """Reset a request's grammar and let it accept these tokens. Returns a failure if it cannot, else None.

        Does nothing if the request has no grammar or still waits for it.
        """
        state = self._states.get(request_id)
        if state is None or self.is_waiting_for(request_id):
            return None
        try:
            state.rollback(state.num_tokens)
        except Exception:
            logger.exception("the grammar of request %s cannot be followed", request_id)
            return GrammarFailure(_FAULT, is_fault=True)
        return self.accept({request_id: output}).get(request_id)

    def bitmask(
        self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> tuple[bytes, dict[str, GrammarFailure]]:
        """Compute which tokens the grammars allow next.

        Returns int32 [rows, ceil(vocab_size / 32)] in C order, and the requests that cannot continue. A request has a
        row for its next token, and a row for the token after each of its drafts. After a draft that the grammar rejects
        every token is allowed, because such a draft is never accepted.
        """
        sizes = [1 + len(drafts.get(request_id, ())) for request_id in request_ids]
        num_rows = sum(sizes)
        if len(self._bitmask) < num_rows:
            self._bitmask = np.empty((num_rows, self._num_words), np.int32)
        starts = list(accumulate(sizes, initial=0))
        refused = self._costs.newcomers_without_room(request_ids)
        errors = self._run(
            request_ids,
            [
                _refuse
                if request_id in refused
                else partial(self._fill, self._states[request_id], drafts.get(request_id, ()), start)
                for request_id, start in zip(request_ids, starts, strict=False)
            ],
            lambda index: self._renew_bitmask(starts[index], sizes[index]),
        )
        for index in errors:
            self._bitmask[starts[index] : starts[index] + sizes[index]] = -1
        return self._bitmask[:num_rows].tobytes(), self._failures(
            {request_ids[index]: error for index, error in errors.items()}
        )

    def _run(
        self,
        request_ids: Sequence[str],
        calls: Sequence[Callable[[], object]],
        on_given_up: Callable[[int], None] = lambda index: None,
    ) -> dict[int, Exception]:
        """Run one call per request in the bounded thread; return exceptions by index (`BoundedThread.run`)."""
        if self._stuck_specs and not self.num_stuck:
            self._stuck_specs.clear()
        num_stuck = self.num_stuck

        def make(spec: GrammarSpec, call: Callable[[], object]) -> None:
            if num_stuck >= MAX_STUCK and spec in self._stuck_specs:
                raise TooManyStuck
            call()

        def give_up(index: int) -> None:
            nonlocal num_stuck
            num_stuck += 1
            self._stuck_specs.add(self._followed[request_ids[index]].request.spec)
            on_given_up(index)

        return self._steps.run(
            [
                partial(make, self._followed[request_id].request.spec, call)
                for request_id, call in zip(request_ids, calls, strict=True)
            ],
            give_up,
        )

    def _fill(self, state: GrammarState, drafts: Sequence[int], row: int) -> None:
        bitmask, num_followed = self._bitmask, 0
        state.fill(bitmask, row)
        for depth, token_id in enumerate(drafts):
            row += 1
            if depth == num_followed and not state.is_terminated and state.accept(token_id):
                num_followed += 1
                state.fill(bitmask, row)
            else:
                bitmask[row] = -1
        state.rollback(num_followed)

    def _renew_bitmask(self, start: int, size: int) -> None:
        """Replace the bitmask by a copy, because an abandoned call may still write into these rows of the old one."""
        self._bitmask = self._bitmask.copy()
        self._bitmask[start : start + size] = -1

    def accept(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, GrammarFailure]:
        """Advance grammars by the sampled tokens; return the requests that cannot continue."""
        followed = [request_id for request_id in sampled if request_id in self._states]
        results: dict[str, GrammarFailure | None] = {}

        def follow(request_id: str) -> None:
            results[request_id] = _follow(self._states[request_id], sampled[request_id])

        errors = self._run(followed, [partial(follow, request_id) for request_id in followed])
        costs = {
            request_id: self._states[request_id].take_cpu_s()
            for index, request_id in enumerate(followed)
            if index not in errors
        }
        results |= dict.fromkeys(self._costs.too_slow_together(costs), _TOO_SLOW_TOGETHER)
        # An abandoned call may still write to `results`.
        failures = {
            request_id: failure for request_id, failure in list(results.items()) if failure is not None
        }
        return failures | self._failures({followed[index]: error for index, error in errors.items()})

    def _failures(self, errors: Mapping[str, Exception]) -> dict[str, GrammarFailure]:
        """Turn exceptions of matchers into failures, and drop these requests' grammar states."""
        failures, unmade = {}, list[str]()
        for request_id, error in errors.items():
            self._drop_state(request_id)
            if isinstance(error, _NoRoom):
                failures[request_id] = _TOO_SLOW_TOGETHER
            elif isinstance(error, TooManyStuck):
                unmade.append(request_id)
                failures[request_id] = GrammarFailure(_STUCK.reason, is_overload=True)
            elif isinstance(error, TookTooLong):
                logger.warning("a step of the grammar of request %s took %s", request_id, error)
                failures[request_id] = GrammarFailure(_TOO_SLOW)
            else:
                logger.error("the grammar of request %s cannot be followed", request_id, exc_info=error)
                failures[request_id] = GrammarFailure(_FAULT, is_fault=True)
        if unmade:
            logger.warning(
                "%d threads are stuck in steps of grammars; %d requests are failed: %s",
                self.num_stuck,
                len(unmade),
                ", ".join(unmade[:_MAX_NAMED]),
            )
        return failures

    def describe(self) -> str:
        """Describe the compilations and stuck threads as `key=value ...`."""
        queue = self.compile_queue
        return f"compiling={queue.num_running} queued={queue.num_queued} stuck_threads={self.num_stuck}"

    def close(self) -> None:
        self.compile_queue.close()
        self._steps.close()

    def _finished(self, request_id: str, result: Grammar | NoGrammar) -> None:
        self._done.append((request_id, result))
        self._compiled.set()
        self.wake()


def _refuse() -> None:
    raise _NoRoom


def _follow(state: GrammarState, token_ids: Sequence[int]) -> GrammarFailure | None:
    for token_id in token_ids:
        if state.is_terminated:
            break  # drop tokens that draft verification has sampled after the end
        if not state.accept(token_id):
            return GrammarFailure(_NOTHING_FITS)
    return GrammarFailure(_TOO_SLOW) if state.is_too_slow else None


def create_structured_output_manager(
    model_path: str, vocab_size: int, eos_token_ids: Collection[int], cache_bytes: int
) -> StructuredOutputManager:
    """Make the manager for a model. It compiles on half of the cores, in a process that is not started yet."""
    num_threads = max(1, min(_MAX_COMPILE_THREADS, len(os.sched_getaffinity(0)) // 2))
    client = GrammarClient(GrammarServerArgs(model_path, vocab_size, sorted(eos_token_ids), num_threads))
    queue = CompileQueue(client, num_threads=num_threads, cache_bytes=cache_bytes)
    return StructuredOutputManager(queue, vocab_size, eos_token_ids)


Announce = Callable[[bytes | None], bytes]
"""Returns the leader's message in all copies; the others call it with None."""


class Announcement(Struct, array_like=True, frozen=True):
    """What came of one call of the leader's manager."""

    compiled: list[Compiled] = []
    failures: dict[str, GrammarFailure] = {}
    bitmask: bytes = b""
    fault: str = ""
    """The exception that the call raised."""


class CopiedGrammars:
    """Has the methods of a `StructuredOutputManager` that the core calls, in each copy of a core.

    How long a grammar takes to compile and to follow decides when its requests start and which of them fail, and
    differs from copy to copy. So one copy, the leader, compiles and follows all grammars, and announces what came of
    it: which requests may start, bitmasks, failures. The others start no compilers and hold no grammars. A step in
    which no request has a grammar announces nothing. Every copy makes the same calls in the same order.

    Args:
        manager: compiles and follows the grammars, in the leader.
    """

    def __init__(self, manager: StructuredOutputManager, announce: Announce, *, is_leader: bool) -> None:
        self._manager = manager
        self._announce = announce
        self._is_leader = is_leader
        self._waiting: dict[str, None] = {}
        """Ids of the requests that wait for their grammar, in the order of their arrival."""
        self._following: dict[str, None] = {}
        """Ids of those that have it, in the order in which they got it."""
        self._refused: list[Compiled] = []
        """Requests that the leader's manager has not taken."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Announcement).decode

    def __bool__(self) -> bool:
        return bool(self._following)

    @property
    def wake(self) -> Callable[[], None]:
        return self._manager.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._manager.wake = wake

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def has_compiled(self) -> bool:
        return self._is_leader and (self._manager.has_compiled or bool(self._refused))

    @property
    def request_ids(self) -> list[str]:
        return [*self._following, *self._waiting]

    def is_following(self, request_id: str) -> bool:
        return request_id in self._following

    def is_waiting_for(self, request_id: str) -> bool:
        return request_id in self._waiting

    def is_deferred(self, request_id: str) -> bool:
        return self._manager.is_deferred(request_id)

    def add(
        self,
        request_id: str,
        request: GrammarRequest,
        output: Sequence[int] = (),
        key: str = "",
        urgency: int = 0,
    ) -> None:
        self._waiting[request_id] = None
        if not self._is_leader:
            return
        try:
            self._manager.add(request_id, request, output, key, urgency)
        except Exception as error:
            logger.exception("the grammar of request %s cannot be compiled", request_id)
            failure = GrammarFailure(f"the grammar cannot be compiled: {error}", is_fault=True)
            self._refused.append(Compiled(request_id, failure))

    def start(self, request_ids: Iterable[str]) -> None:
        if self._is_leader:
            self._manager.start(request_ids)

    def warm_up(self) -> None:
        if self._is_leader:
            self._manager.warm_up()

    def tick(self) -> None:
        if self._is_leader:
            self._manager.tick()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until `take_compiled` has something new, in the leader; the others wait in `take_compiled`."""
        if self._is_leader and not self.has_compiled:
            self._manager.wait(timeout_s)

    def take_compiled(self) -> list[Compiled]:
        if not self._waiting:
            return []

        def take() -> Announcement:
            refused, self._refused = self._refused, []
            return Announcement(compiled=refused + self._manager.take_compiled())

        compiled = []
        for each in self._announced(take).compiled:
            before, after = self._waiting, self._following
            if each.is_deferred:
                before, after = after, before
            if each.request_id in before:
                del before[each.request_id]
                if each.failure is None:
                    after[each.request_id] = None
                compiled.append(each)
        return compiled

    def bitmask(
        self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS
    ) -> tuple[bytes, dict[str, GrammarFailure]]:
        def fill() -> Announcement:
            bitmask, failures = self._manager.bitmask(request_ids, drafts)
            return Announcement(bitmask=bitmask, failures=failures)

        made = self._announced(fill)
        return made.bitmask, self._dropped(made.failures)

    def accept(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, GrammarFailure]:
        followed = {
            request_id: tokens for request_id, tokens in sampled.items() if request_id in self._following
        }
        if not any(followed.values()):
            return {}
        made = self._announced(lambda: Announcement(failures=self._manager.accept(followed)))
        return self._dropped(made.failures)

    def replay(self, request_id: str, output: Sequence[int]) -> GrammarFailure | None:
        if request_id not in self._following:
            return None

        def replay() -> Announcement:
            failure = self._manager.replay(request_id, output)
            return Announcement(failures={} if failure is None else {request_id: failure})

        return self._dropped(self._announced(replay).failures).get(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        forgotten = list(request_ids)
        for request_id in forgotten:
            self._waiting.pop(request_id, None)
            self._following.pop(request_id, None)
        if self._is_leader:
            self._manager.forget(forgotten)

    def close(self) -> None:
        self._manager.close()

    def describe(self) -> str:
        return self._manager.describe()

    def _dropped(self, failures: dict[str, GrammarFailure]) -> dict[str, GrammarFailure]:
        """Return the failures, of requests that are followed no longer."""
        for request_id in failures:
            self._following.pop(request_id, None)
        return failures

    def _announced(self, call: Callable[[], Announcement]) -> Announcement:
        """Call the leader's manager and return in all copies what came of it.

        Raises:
            RuntimeError: the manager has raised an exception.
            EngineDead: another copy has ended.
        """
        own: bytes | None = None
        if self._is_leader:
            try:
                own = self._encode(call())
            except Exception as error:
                logger.exception("the leader's grammars")
                own = self._encode(Announcement(fault=f"{type(error).__name__}: {error}"))
        made = self._decode(self._announce(own))
        if made.fault:
            raise RuntimeError(f"the first copy could not follow grammars: {made.fault}")
        return made

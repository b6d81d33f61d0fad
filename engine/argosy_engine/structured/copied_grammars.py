"""CopiedGrammars: structured outputs of a core of which there are copies in other processes.

How long a grammar takes to compile and to follow decides when its requests start and which of them fail, and differs
from copy to copy. So one copy, the leader, compiles and follows all grammars, and announces what came of it: which
requests may start, bitmasks, failures. The others start no compilers and hold no grammars. A step in which no request
has a grammar announces nothing. Every copy makes the same calls in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from argosy_engine.structured.manager import (
    Compiled,
    GrammarFailure,
    GrammarRequest,
    StructuredOutputManager,
)

logger = logging.getLogger("argosy.structured")

Announce = Callable[[bytes | None], bytes]
"""Returns the leader's message in all copies; the others call it with None."""

_NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """What came of one call of the leader's manager."""

    compiled: list[Compiled] = []
    failures: dict[str, GrammarFailure] = {}
    bitmask: bytes = b""
    fault: str = ""
    """The exception that the call raised."""


class CopiedGrammars:
    """Has the methods of a `StructuredOutputManager` that the core calls.

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
        self, request_id: str, request: GrammarRequest, output: Sequence[int] = (), key: str = ""
    ) -> None:
        self._waiting[request_id] = None
        if not self._is_leader:
            return
        try:
            self._manager.add(request_id, request, output, key)
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

        compiled = [each for each in self._announced(take).compiled if each.request_id in self._waiting]
        for each in compiled:
            del self._waiting[each.request_id]
            if each.failure is None:
                self._following[each.request_id] = None
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

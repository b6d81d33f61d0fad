"""QueuedGrammars: bounds the memory of the compiled grammars that requests hold while they wait for a slot.

The cache of compiled grammars is bounded (`CompileQueue`), and slots bound those of running requests. Of the waiting
requests, which may be thousands, each with a grammar of its own, those that come first hold theirs, up to
`MAX_QUEUED_BYTES` in all. The others keep only the text, and their grammar is compiled again once there is room for it.
Tenants take turns at that, and a large grammar is not overtaken by smaller ones.
"""

from __future__ import annotations

from collections import Counter

from argosy_engine.structured.round_robin_queue import RoundRobinQueue
from argosy_engine.structured.structured_outputs_params import GrammarSpec

MAX_QUEUED_BYTES = 256 << 20
"""As much as the cache by default. A usual schema takes 10 to 100 KB, so thousands of requests hold theirs."""
MAX_RESUMED = 32
"""Maximum number of grammars that are compiled again at the same time, so that they leave room in the compile queue."""


class QueuedGrammars:
    """Which waiting requests hold their compiled grammar. Equal grammars count once.

    Invariant: `num_bytes` is the sum over the different grammars of the requests that hold one.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._specs: dict[str, GrammarSpec] = {}
        """Requests that hold a grammar -> grammar."""
        self._num_holders: Counter[GrammarSpec] = Counter()
        self._sizes: dict[GrammarSpec, int] = {}
        self._deferred: dict[str, tuple[str, GrammarSpec, int]] = {}
        """Requests that hold none -> tenant, grammar and size."""
        self._turns: RoundRobinQueue[str] = RoundRobinQueue()
        """The same requests, by tenant."""
        self._resumed: set[str] = set()
        """Requests that have their room, and whose grammar is compiled again."""

    def admit(self, request_id: str, key: str, spec: GrammarSpec, num_bytes: int) -> bool:
        """Whether a request may hold its grammar, which has been compiled. If not, `resume` will return the request.

        Args:
            key: its tenant.
        """
        self._resumed.discard(request_id)
        if request_id in self._specs:
            return True
        if spec not in self._sizes and (self._deferred or not self._has_room(num_bytes)):
            self._deferred[request_id] = key, spec, num_bytes
            self._turns.push(key, request_id)
            return False
        self._hold(request_id, spec, num_bytes)
        return True

    def resume(self) -> str | None:
        """Return a request that may hold its grammar now, whose room is taken from now on; None if there is none."""
        turn = self._turns.peek()
        if turn is None or len(self._resumed) >= MAX_RESUMED:
            return None
        request_id = turn[1]
        _, spec, num_bytes = self._deferred[request_id]
        if spec not in self._sizes and not self._has_room(num_bytes):
            return None
        self._turns.pop()
        del self._deferred[request_id]
        self._resumed.add(request_id)
        self._hold(request_id, spec, num_bytes)
        return request_id

    def release(self, request_id: str) -> None:
        """Forget a request, which has started or ended. Unknown ids are ignored."""
        self._resumed.discard(request_id)
        deferred = self._deferred.pop(request_id, None)
        if deferred is not None:
            self._turns.remove(deferred[0], request_id)
        spec = self._specs.pop(request_id, None)
        if spec is None:
            return
        self._num_holders[spec] -= 1
        if not self._num_holders[spec]:
            del self._num_holders[spec]
            self.num_bytes -= self._sizes.pop(spec)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether a grammar of this size may be held. One alone may be of any size."""
        return not self._specs or self.num_bytes + num_bytes <= self.max_bytes

    def _hold(self, request_id: str, spec: GrammarSpec, num_bytes: int) -> None:
        self._specs[request_id] = spec
        self._num_holders[spec] += 1
        if spec not in self._sizes:
            self._sizes[spec] = num_bytes
            self.num_bytes += num_bytes

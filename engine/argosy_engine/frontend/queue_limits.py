"""QueueLimits: rejects requests while too many are in flight or queued.

There are two limits, as in vLLM: requests in flight (`--max-num-queued-reqs`, waiting and running) and prompt tokens of
requests that have no first token yet (`--max-num-queued-tokens`: about the target TTFT times the prefill rate). A
rejection has a retry time, computed from measured rates.

With several data-parallel ranks the limits are those of all together. A request that chooses its rank must also fit
into the rank's equal share, so that those who choose the same rank leave room for the others.

With several API processes the limits are those of all together: each tells the others its counts in shared memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from argosy_engine.errors import EngineBusy, InvalidRequest
from argosy_engine.osproc.shared_counters import SharedCounters

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
_FINISHES = 64
"""Number of finished requests from which the completion rate is measured."""


class _Load:
    """Requests of all ranks, or of one.

    Args:
        counters: of several API processes.
        column: the first of two columns for this load.
    """

    def __init__(self, counters: SharedCounters | None = None, column: int = 0) -> None:
        self._num_reqs = 0
        self._num_queued_tokens = 0
        self._counters = counters
        self._column = column

    @property
    def num_reqs(self) -> int:
        others = 0 if self._counters is None else self._counters.others(self._column)
        return self._num_reqs + others

    @property
    def num_queued_tokens(self) -> int:
        others = 0 if self._counters is None else self._counters.others(self._column + 1)
        return self._num_queued_tokens + others

    def count(self, num_reqs: int, num_queued_tokens: int) -> None:
        """Add to the counts of this process."""
        self._num_reqs += num_reqs
        self._num_queued_tokens += num_queued_tokens
        if self._counters is not None:
            self._counters.set(self._column, self._num_reqs)
            self._counters.set(self._column + 1, self._num_queued_tokens)


class QueueLimits:
    """
    Invariant: `num_queued_tokens` is the sum over requests that entered, did not leave and have no first token.

    Args:
        max_num_queued_tokens: None: no limit. A request that is alone in the queue is never rejected for its length.
        num_ranks: number of data-parallel ranks.
        on_rejected: called with the name of the limit and the rank, if one was chosen, for each rejection.
        counters: of several API processes; two columns, and two for each rank.
        num_processes: number of API processes.
    """

    def __init__(
        self,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int = 1,
        on_rejected: Callable[[str, int | None], None] | None = None,
        counters: SharedCounters | None = None,
        num_processes: int = 1,
    ) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self.prefill_tokens_per_s = 0.0
        """Prefill rate in tokens per second, as the core measured it; 0 while unknown."""
        self._clock = clock
        self._on_rejected = on_rejected
        self._num_tokens: dict[str, int] = {}
        """Queued prompt tokens of each request in flight; 0 from its first token on."""
        self._ranks: dict[str, int] = {}
        """Ranks of the requests in flight, as far as they are known."""
        self._total = _Load(counters)
        self._loads = [_Load(counters, 2 * (1 + rank)) for rank in range(num_ranks)]
        self._num_processes = num_processes
        self._finishes: deque[float] = deque(maxlen=_FINISHES)

    @property
    def num_reqs(self) -> int:
        """Requests in flight, of all API processes."""
        return self._total.num_reqs

    @property
    def num_queued_tokens(self) -> int:
        return self._total.num_queued_tokens

    def check(self, num_reqs: int, num_tokens: int = 0, rank: int | None = None) -> None:
        """Check that a number of requests, with a number of prompt tokens in total, may enter.

        Args:
            rank: data-parallel rank that they choose; None: any.

        Raises:
            EngineBusy: too many requests or tokens are queued; `retry_after_s` says when to try again.
            InvalidRequest: there are more than an idle engine, or rank, accepts.
        """
        if rank is not None and len(self._loads) > 1:
            where = f"data-parallel rank {rank}"
            self._check(
                num_reqs, num_tokens, rank, self._loads[rank], where, f" in {where}", len(self._loads)
            )
        self._check(num_reqs, num_tokens, rank, self._total, "this engine", "", 1)

    def _check(
        self, num_reqs: int, num_tokens: int, rank: int | None, load: _Load, who: str, where: str, shares: int
    ) -> None:
        """Check one load against an equal share of the limits."""
        max_num_reqs = -(-self.max_num_queued_reqs // shares)
        if num_reqs > max_num_reqs:
            raise InvalidRequest(
                f"the call asks for {num_reqs} choices at once, {who} takes {max_num_reqs} "
                "(--max-num-queued-reqs)",
                param="n",
            )
        excess = load.num_reqs + num_reqs - max_num_reqs
        if excess > 0:
            self._reject("max_num_queued_reqs", rank)
            raise EngineBusy(
                f"{load.num_reqs} requests are waiting or running{where}, at most {max_num_reqs} may",
                retry_after_s=_retry_after(excess, self._finish_rate() / shares),
            )
        if self.max_num_queued_tokens is not None and load.num_queued_tokens:
            max_num_tokens = -(-self.max_num_queued_tokens // shares)
            excess = load.num_queued_tokens + num_tokens - max_num_tokens
            if excess > 0:
                self._reject("max_num_queued_tokens", rank)
                raise EngineBusy(
                    f"{load.num_queued_tokens} prompt tokens are waiting{where}, at most {max_num_tokens} may",
                    retry_after_s=_retry_after(excess, self.prefill_tokens_per_s / shares),
                )

    def _reject(self, limit: str, rank: int | None) -> None:
        if self._on_rejected is not None:
            self._on_rejected(limit, rank)

    def enter(self, request_id: str, num_tokens: int, rank: int | None = None) -> None:
        """Count a request that passed the check.

        Args:
            rank: data-parallel rank that it chooses; None: `place` tells it later.
        """
        self._num_tokens[request_id] = num_tokens
        self._total.count(1, num_tokens)
        if rank is not None:
            self.place(request_id, rank)

    def place(self, request_id: str, rank: int) -> None:
        """Record the data-parallel rank of a request. Does nothing if that is known, or the request has left."""
        if request_id in self._num_tokens and request_id not in self._ranks:
            self._ranks[request_id] = rank
            self._loads[rank].count(1, self._num_tokens[request_id])

    def start(self, request_id: str) -> None:
        """Record that the request has its first token."""
        num_tokens = self._num_tokens.get(request_id, 0)
        self._num_tokens[request_id] = 0
        for load in self._loads_of(request_id):
            load.count(0, -num_tokens)

    def leave(self, request_id: str) -> None:
        """Record that the request ended, for whatever reason."""
        num_tokens = self._num_tokens.pop(request_id)
        for load in self._loads_of(request_id):
            load.count(-1, -num_tokens)
        self._ranks.pop(request_id, None)
        self._finishes.append(self._clock())

    def _loads_of(self, request_id: str) -> Iterator[_Load]:
        yield self._total
        rank = self._ranks.get(request_id)
        if rank is not None:
            yield self._loads[rank]

    def _finish_rate(self) -> float:
        """Recent completion rate in requests per second, if other API processes have the same; 0 if unknown."""
        if len(self._finishes) < 2:
            return 0.0
        elapsed = self._clock() - self._finishes[0]
        return self._num_processes * len(self._finishes) / elapsed if elapsed > 0 else 0.0


def _retry_after(amount: float, rate: float) -> float:
    """Return the seconds until an amount of work is done at a rate, within bounds."""
    seconds = amount / rate if rate > 0 else MIN_RETRY_S
    return min(max(math.ceil(seconds), MIN_RETRY_S), MAX_RETRY_S)

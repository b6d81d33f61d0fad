"""QueueLimits: rejects requests while too many are in flight or queued.

There are two limits, as in vLLM: requests in flight (`--max-num-queued-reqs`, waiting and running) and prompt tokens of
requests that have no first token yet (`--max-num-queued-tokens`: about the target TTFT times the prefill rate). A
rejection has a retry time, computed from measured rates.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from argosy_engine.errors import EngineBusy, InvalidRequest

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
_FINISHES = 64
"""Number of finished requests from which the completion rate is measured."""


class QueueLimits:
    """
    Invariant: `num_queued_tokens` is the sum over requests that entered, did not leave and have no first token.

    Args:
        max_num_queued_tokens: None: no limit. A request that is alone in the queue is never rejected for its length.
    """

    def __init__(
        self,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_num_queued_reqs = max_num_queued_reqs
        self.max_num_queued_tokens = max_num_queued_tokens
        self.num_queued_tokens = 0
        self.prefill_tokens_per_s = 0.0
        """Prefill rate in tokens per second, as the core measured it; 0 while unknown."""
        self._clock = clock
        self._num_tokens: dict[str, int] = {}
        """Queued prompt tokens of each request in flight; 0 from its first token on."""
        self._finishes: deque[float] = deque(maxlen=_FINISHES)

    @property
    def num_reqs(self) -> int:
        return len(self._num_tokens)

    def check(self, num_reqs: int, num_tokens: int = 0) -> None:
        """Check that a number of requests, with a number of prompt tokens in total, may enter.

        Raises:
            EngineBusy: too many requests or tokens are queued; `retry_after_s` says when to try again.
            InvalidRequest: there are more than an idle engine accepts.
        """
        if num_reqs > self.max_num_queued_reqs:
            raise InvalidRequest(
                f"the call asks for {num_reqs} choices at once, this engine takes {self.max_num_queued_reqs} "
                "(--max-num-queued-reqs)",
                param="n",
            )
        excess = self.num_reqs + num_reqs - self.max_num_queued_reqs
        if excess > 0:
            raise EngineBusy(
                f"{self.num_reqs} requests are waiting or running, at most {self.max_num_queued_reqs} may",
                retry_after_s=_retry_after(excess, self._finish_rate()),
            )
        if self.max_num_queued_tokens is not None and self.num_queued_tokens:
            excess = self.num_queued_tokens + num_tokens - self.max_num_queued_tokens
            if excess > 0:
                raise EngineBusy(
                    f"{self.num_queued_tokens} prompt tokens are waiting, at most "
                    f"{self.max_num_queued_tokens} may",
                    retry_after_s=_retry_after(excess, self.prefill_tokens_per_s),
                )

    def enter(self, request_id: str, num_tokens: int) -> None:
        """Count a request that passed the check."""
        self._num_tokens[request_id] = num_tokens
        self.num_queued_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """Record that the request has its first token."""
        self.num_queued_tokens -= self._num_tokens.get(request_id, 0)
        self._num_tokens[request_id] = 0

    def leave(self, request_id: str) -> None:
        """Record that the request ended, for whatever reason."""
        self.num_queued_tokens -= self._num_tokens.pop(request_id)
        self._finishes.append(self._clock())

    def _finish_rate(self) -> float:
        """Recent completion rate in requests per second; 0 if unknown."""
        if len(self._finishes) < 2:
            return 0.0
        elapsed = self._clock() - self._finishes[0]
        return len(self._finishes) / elapsed if elapsed > 0 else 0.0


def _retry_after(amount: float, rate: float) -> float:
    """Return the seconds until an amount of work is done at a rate, within bounds."""
    seconds = amount / rate if rate > 0 else MIN_RETRY_S
    return min(max(math.ceil(seconds), MIN_RETRY_S), MAX_RETRY_S)

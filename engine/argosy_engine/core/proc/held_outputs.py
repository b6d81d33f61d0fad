"""HeldOutputs: messages of the core that nobody waits for, held back to be sent together with later ones.

A request whose output is read once it is complete (`EngineCoreRequest.final_only`) needs its tokens at its end. A
message for each step would wake the API process for each; sent together they wake it once. The messages themselves do
not change, so counters and latencies keep their values: a held message carries the time when it was to be sent.

Held is a message that has tokens of such requests and nothing else but statistics: not their first token, which
releases a prompt's other choices and ends the time to the first token, and no end.

Invariants: a client's messages keep their order, and none is held for longer than `HOLD_S`.

Thread-safe: requests are added and removed by other threads than the one that sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from argosy_engine.messages.core_messages import EngineCoreOutputs, EngineCoreRequest

HOLD_S = 0.1
"""Metrics and telemetry lag by it at most."""
MAX_HELD = 64
"""Maximum number of messages held for a client, which it processes at once."""


class HeldOutputs:
    """
    Args:
        num_clients: number of API processes.
        clock: monotonic seconds.
    """

    def __init__(self, num_clients: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet: set[str] = set()
        """Requests with `final_only` that have not ended."""
        self._held: list[list[bytes]] = [[] for _ in range(num_clients)]
        """Encoded messages of each client."""
        self._due: float | None = None
        """When the oldest one must be sent."""

    def add(self, request: EngineCoreRequest) -> None:
        if request.final_only:
            self._quiet.add(request.request_id)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget aborted requests; those that end by an output are forgotten with it."""
        self._quiet.difference_update(request_ids)

    def can_hold(self, client: int, message: EngineCoreOutputs) -> bool:
        """Return whether a message may be held. If so, it gets its timestamp."""
        quiet = self._quiet
        if not quiet or not message.outputs:
            return False
        is_loud = False
        for output in message.outputs:
            if output.finish_reason is not None:
                quiet.discard(output.request_id)
                is_loud = True
            elif output.prefill_stats is not None or output.request_id not in quiet:
                is_loud = True
        if is_loud or message.residency is not None or message.utility is not None:
            return False
        if len(self._held[client]) >= MAX_HELD:
            return False
        message.timestamp = self._clock()
        return True

    def hold(self, client: int, message: bytes) -> None:
        """Hold an encoded message."""
        if self._due is None:
            self._due = self._clock() + HOLD_S
        self._held[client].append(message)

    def take(self, client: int) -> list[bytes]:
        """Return what is held for a client, to be sent now."""
        held, self._held[client] = self._held[client], []
        if self._due is not None and not any(self._held):
            self._due = None
        return held

    @property
    def is_due(self) -> bool:
        """Whether what is held must be sent now."""
        return self._due is not None and self._clock() >= self._due

    @property
    def wait_s(self) -> float | None:
        """Seconds until what is held must be sent, 0 at least; None if nothing is held."""
        return None if self._due is None else max(0.0, self._due - self._clock())

"""The outcome record of one request, from its arrival to its end.

The exchange fills it in; request accounting and the settlement of rate limits read it once the request has ended.
Neither of them knows exchanges.
"""

from __future__ import annotations

from argosy_router.fleet.service import Choice
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.upstream.attempt_log import AttemptRecord
from argosy_router.proxy.upstream.usage_scan import TokenUsage
from argosy_router.ratelimit.key_limits import Reservation

CLIENT_GONE = 499
"""nginx's status for a client that left before its answer began."""


class RequestOutcome:
    """How one request ended. Times are seconds; `started` and `sent_at` are read from a monotonic clock."""

    __slots__ = (
        "attempts",
        "call",
        "choice",
        "first_event_s",
        "is_cut_short",
        "migrations",
        "queued_s",
        "record",
        "reservation",
        "sent_at",
        "sent_tokens",
        "started",
        "status",
        "usage",
    )

    def __init__(self, call: Call, started: float) -> None:
        """`started` is when the whole request had arrived."""
        self.call = call
        self.started = started
        self.status = 0
        """Status sent to the client; `CLIENT_GONE` if it left before one was sent."""
        self.attempts = 0
        """Attempts sent to replicas, including those repeated on a new connection."""
        self.migrations = 0
        """Attempts that continued a stream whose replica had failed."""
        self.queued_s = 0.0
        """Seconds spent in the queue."""
        self.first_event_s: float | None = None
        """Seconds from the request's arrival to the first byte of its answer; None without an answer in pieces."""
        self.is_cut_short = False
        """Whether the request got an error because its time passed while its replica computed."""
        self.reservation: Reservation | None = None
        """What the request took of its key's limits; None for a key without limits."""

        # Of the last attempt, set when the request ends.
        self.choice: Choice | None = None
        self.record: AttemptRecord | None = None
        self.sent_at = started
        """When the attempt began; when the request arrived if there was no attempt."""
        self.usage: TokenUsage | None = None
        """Token counts that the answer reported."""
        self.sent_tokens: int | None = None
        """Tokens that the client was sent of a stream that did not report its usage."""

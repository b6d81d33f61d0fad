"""The outcome record of one request, from its arrival to its end.

The exchange fills it in; request accounting and the settlement of rate limits read it once the request has ended.
Neither of them knows exchanges.
"""

from __future__ import annotations

from argosy_protocol.errors import NO_REASON
from argosy_protocol.openai import MAX_TOKENS
from argosy_router.fleet.service import Choice
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.upstream.attempt_log import AttemptRecord
from argosy_router.proxy.upstream.relay import StreamRelay, UnaryRelay
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
        "error",
        "first_event_s",
        "generated_tokens",
        "is_cut_short",
        "migrations",
        "queued_s",
        "record",
        "reservation",
        "sent_at",
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
        self.error = NO_REASON
        """Why the client got an error, if it did."""
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
        self.generated_tokens: int | None = None
        """Tokens that were generated for a stream that did not report the usage of all of it, as far as that is known;
        `usage` is then what it last reported of all sequences, if anything."""

    def note_answer(
        self, relay: UnaryRelay | StreamRelay, choice: Choice, *, is_cut: bool = False, silent_s: float = 0.0
    ) -> None:
        """Note what is known of the usage of an answer, or of the part that was sent.

        Args:
            choice: the replica that gave it.
            is_cut: it ended before it was whole.
            silent_s: how long the replica can have generated since it last sent something.
        """
        usage = self.usage = relay.usage
        if isinstance(relay, UnaryRelay) or (usage is not None and (not is_cut or relay.has_whole_usage)):
            return
        call, replica = self.call, choice.replica
        estimate = call.estimate
        if estimate.sequences > 1:
            self.usage = None  # perhaps that of one choice
        sent = relay.tokens(call.service.lengths.bytes_per_token)
        max_tokens = replica.hello.max_model_len if replica.hello is not None else MAX_TOKENS
        max_unsent = call.stream_interval - 1 if relay.has_token_ids else max_tokens
        self.generated_tokens = sent + estimate.unsent_in(
            silent_s, replica.load.decode_step_s, sent, max_unsent, max_tokens
        )

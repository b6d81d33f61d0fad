"""Accounting: what is reserved, counted, logged and billed of each request.

Owns: the outcome record of a request, which the exchange fills in; its reservation of the key's limits; the request
metrics; the rings of decision records and refusals that the admin port shows; and what the access log, the usage
ledger, the capture and traces are told. Must not know: exchanges, connections, retries, how a replica is chosen.
Invariants: a request is closed once, when nothing can change its outcome any more, so that one that was retried or
migrated is counted, logged and billed once, and a reservation settled once. A ring has at most `CAPACITY` records,
which name requests by their ids and have neither prompts nor keys.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from argosy_protocol.errors import NO_REASON, ErrorReason
from argosy_protocol.openai import MAX_TOKENS
from argosy_router.auth.accounts import Account, RateLimited, Reservation
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Choice
from argosy_router.metrics import RATE_LIMITED, Metrics
from argosy_router.observability.lines import CapturedRequest, TraceCapture
from argosy_router.observability.request_log import AccessEntry, AccessLog, UsageLedger
from argosy_router.prefixes import learnt
from argosy_router.proxy.answer_tokens import TokenUsage
from argosy_router.proxy.call import Call
from argosy_router.proxy.relay import StreamRelay, UnaryRelay

CAPACITY = 1000
"""Records kept: a few hundred kilobytes; a minute of a busy service."""

HedgeOutcome = Literal["won", "lost", "failed", "promoted", "abandoned"]
"""won: the hedge responded first; lost: the first attempt did; failed: the hedge failed before that; promoted: the
first attempt failed, and the hedge took its place; abandoned: the client left before that."""


FIELDS = (
    *("time", "request_id", "model", "replica", "reason", "attempt", "prompt_tokens"),
    *("predicted_cached_tokens", "predicted_ttft_s", "cost_s", "mode", "resumed_tokens"),
    *("hedge", "status", "cached_tokens", "completion_tokens", "ttft_s", "upstream_id"),
)
_ERROR = ("error_type", "error_code", "error_param")


class AttemptRecord:
    """One attempt that was sent, and the decision for its replica."""

    def __init__(
        self,
        time: float,
        request_id: str,
        model: str,
        replica: str,
        reason: str,
        attempt: int,
        prompt_tokens: int,
        predicted_cached_tokens: int,
        predicted_ttft_s: float | None,
        cost_s: float,
        mode: str,
    ) -> None:
        self.time = time
        """Unix time of the dispatch."""
        self.request_id = request_id
        self.model = model
        self.replica = replica
        self.reason = reason
        self.attempt = attempt
        self.prompt_tokens = prompt_tokens
        """Estimated; once the answer has reported its usage, the true number."""
        self.predicted_cached_tokens = predicted_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        """None if the replica's speed was not measured yet."""
        self.cost_s = cost_s
        self.mode = mode
        """State of the replica's telemetry at the dispatch: `synced`, `stale` or `foreign`."""
        self.resumed_tokens = 0
        """Output tokens of a failed replica that precede what this attempt generates."""
        self.hedge: Literal["", "racing"] | HedgeOutcome = ""
        """How a hedge ended; empty for attempts that are no hedges."""
        self.status = 0
        """Zero until the request has ended."""
        self.error = NO_REASON
        """Why the client got an error, if it did."""
        self.cached_tokens: int | None = None
        """From the usage that the answer reports; None if it reported none."""
        self.completion_tokens: int | None = None
        """From the same usage; without one, the tokens that a stream's client was sent."""
        self.ttft_s: float | None = None
        """Streams only."""
        self.upstream_id = b""
        """The attempt's request id at the engine and in its log; empty until it is sent."""

    def as_dict(self) -> dict[str, object]:
        values: dict[str, object] = {name: getattr(self, name) for name in FIELDS}
        values["upstream_id"] = self.upstream_id.decode()
        values.update(zip(_ERROR, self.error, strict=True))
        return values


class AttemptLog:
    """A ring of the newest records."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[AttemptRecord] = deque(maxlen=capacity)

    def add(self, record: AttemptRecord) -> None:
        self._records.append(record)

    def latest(self, limit: int, model: str = "") -> Iterator[AttemptRecord]:
        """Yield the newest records first, of one model if it is given."""
        for record in reversed(self._records):
            if limit <= 0:
                return
            if not model or record.model == model:
                limit -= 1
                yield record


class RefusedRequest:
    """One request that got an error before it was sent to a replica."""

    def __init__(self, time: float, request_id: str, model: str, status: int, error: ErrorReason) -> None:
        """`time` is the Unix time of the refusal; `model` is empty if the request was refused before it was decoded."""
        self.time = time
        self.request_id = request_id
        self.model = model
        self.status = status
        self.error = error

    def as_dict(self) -> dict[str, object]:
        values: dict[str, object] = {
            "time": self.time,
            "request_id": self.request_id,
            "model": self.model,
            "status": self.status,
        }
        values.update(zip(_ERROR, self.error, strict=True))
        return values


class RefusalLog:
    """A ring of the newest refusals. Requests without a valid key are left out: whoever tries keys could
    fill the ring."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._refused: deque[RefusedRequest] = deque(maxlen=capacity)

    def add(self, refused: RefusedRequest) -> None:
        if refused.status != 401:
            self._refused.append(refused)

    def latest(self, limit: int) -> Iterator[RefusedRequest]:
        """Yield the newest refusals first."""
        return islice(reversed(self._refused), limit)


CLIENT_GONE = 499
"""nginx's status for a client that left before its answer began."""


class RequestOutcome:
    """How one request ended. Times are seconds; `started` and `sent_at` are read from a monotonic clock."""

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


class RequestAccounting:
    """Accounts for all requests of one router."""

    def __init__(
        self,
        metrics: Metrics,
        access_log: AccessLog,
        ledger: UsageLedger,
        *,
        capture: TraceCapture | None = None,
        policy: str = "",
    ) -> None:
        """`policy` is the router's own, which overrides the services'; empty for none."""
        self._metrics = metrics
        self._access_log = access_log
        self._ledger = ledger
        self._capture = capture
        self._policy = policy
        self._limited = RATE_LIMITED.counter()
        metrics.add(self._limited)
        self.attempt_log = AttemptLog()
        self.refusal_log = RefusalLog()

    def usage_of(self, key: str) -> bytes:
        """Render what the key of this name has used in Prometheus' text format."""
        return self._ledger.render(key)

    # before a request is sent

    def charge_request(self, account: Account, now: float) -> bool:
        """Charge a request to its key's limits at its head, if the key has any; return whether it has.

        Raises:
            RateLimited: the key's rate is reached; nothing was charged.
        """
        if not account.is_limited:
            return False
        try:
            account.charge_request(now)
        except RateLimited:
            self._limited.add((account.name,))
            raise
        return True

    def reserve(self, outcome: RequestOutcome) -> None:
        """Reserve a request's estimated tokens, if its key has limits.

        Raises:
            RateLimited: one of the limits is reached; nothing was taken.
            BadRequest: the request can never be within the limits.
        """
        call = outcome.call
        account = call.account
        if not account.is_limited:
            return
        try:
            outcome.reservation = account.reserve(
                call.estimate.total, outcome.started, call.estimate.sequences, is_charged=call.is_charged
            )
        except RateLimited:
            self._limited.add((account.name,))
            raise

    # while a request is in flight

    def record_attempt(self, call: Call, choice: Choice, attempt: int) -> AttemptRecord:
        """Count an attempt that is being sent, and add its decision record to the ring."""
        model, replica, decision = call.service.model, choice.replica, choice.decision
        self._metrics.routes.add((model, replica.name, decision.reason, replica.link))
        record = AttemptRecord(
            time.time(),
            call.request_id.decode(),
            model,
            replica.name,
            decision.reason,
            attempt,
            choice.uncached_tokens + decision.predicted_tokens,
            decision.predicted_tokens,
            choice.measured_ttft_s,
            decision.cost_s,
            replica.link,
        )
        self.attempt_log.add(record)
        return record

    def count_retry(self, call: Call, reason: str) -> None:
        """Count an attempt that is repeated before the answer began."""
        self._metrics.retries.add((call.service.spec.model, reason))

    def count_hedge(self, call: Call, record: AttemptRecord, outcome: HedgeOutcome) -> None:
        """Count how the hedge that `record` describes ended."""
        record.hedge = outcome
        self._metrics.hedges.add((call.service.spec.model, outcome))

    def count_migration(self, call: Call, outcome: str) -> None:
        """Count how a stream continued after its replica failed."""
        self._metrics.migrations.add((call.service.spec.model, outcome))

    def count_interruption(self, call: Call, replica: Replica) -> None:
        """Count an answer that ends incomplete because `replica` failed."""
        self._metrics.interrupted.add((call.service.spec.model, replica.name))

    def count_disconnect(self, call: Call) -> None:
        """Count a client that left before the end of its answer."""
        self._metrics.disconnects.add((call.service.spec.model,))

    def count_rejection(self, request_id: bytes, status: int, error: ErrorReason) -> None:
        """Count and log a request that got an error before it was decoded into a call."""
        self._metrics.requests.add(("", str(status)))
        now, name = time.time(), request_id.decode()
        self.refusal_log.add(RefusedRequest(now, name, "", status, error))
        if self._access_log.is_enabled:
            self._access_log.write(AccessEntry(now, name, status, error=error))

    # at its end

    def close(self, outcome: RequestOutcome, now: float) -> None:
        """Account for a request that has ended, and charge the tokens that it has used, or release its reservation if
        it was never sent."""
        self._record(outcome, now - outcome.started)
        if outcome.reservation is None:
            return
        if outcome.attempts:
            outcome.reservation.settle(_tokens_used(outcome, now))
        else:
            outcome.reservation.cancel()

    def _record(self, outcome: RequestOutcome, duration_s: float) -> None:
        """Count, log and bill."""
        call, record = outcome.call, outcome.record
        now_s = time.monotonic()
        self._count_tokens(outcome, now_s)
        model, metrics = call.service.model, self._metrics
        metrics.requests.add((model, str(outcome.status)))
        metrics.duration.observe((model,), duration_s)
        if call.canary_of is not None:
            metrics.canaried.add((call.canary_of.model, call.service.name))
        if outcome.first_event_s is not None:
            metrics.ttft.observe((model,), outcome.first_event_s)
            is_first = record is not None and record.attempt == 1
            if call.is_stream and is_first and outcome.status == 200:
                self._learn_ttft(outcome, outcome.first_event_s - outcome.queued_s)
        if record is not None:
            record.status = outcome.status
            record.error = outcome.error
            self._bill(outcome, record, duration_s)
            if self._capture is not None:
                self._capture.add(_recorded(call, record, time.time() - duration_s))
        elif outcome.status != CLIENT_GONE:
            name = call.request_id.decode()
            self.refusal_log.add(RefusedRequest(time.time(), name, model, outcome.status, outcome.error))
        if self._access_log.is_enabled or call.trace is not None:
            entry = _access_entry(outcome, duration_s)
            if self._access_log.is_enabled:
                self._access_log.write(entry)
            if call.trace is not None:
                expected_s = None if record is None else record.predicted_ttft_s
                call.trace.end(entry, self._policy or call.service.spec.policy, expected_s)

    def _count_tokens(self, outcome: RequestOutcome, now_s: float) -> None:
        """Count the tokens that the answer reports, and have the service and the account learn from them."""
        call, choice, record, usage = outcome.call, outcome.choice, outcome.record, outcome.usage
        if choice is None or record is None:
            return
        generated = outcome.generated_tokens
        if usage is None:
            record.completion_tokens = generated
            return
        record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        record.completion_tokens = max(usage.completion_tokens, generated or 0)
        labels = (call.service.model, choice.replica.name)
        self._metrics.prompt_tokens.add(labels, usage.prompt_tokens)
        self._metrics.completion_tokens.add(labels, usage.completion_tokens)
        self._metrics.predicted.add(labels, choice.decision.predicted_tokens)
        self._metrics.actual.add(labels, usage.cached_tokens)
        if call.service.sides is not None:
            call.service.sides.observe_tokens(
                choice.replica.revision,
                usage.prompt_tokens,
                choice.decision.predicted_tokens,
                usage.cached_tokens,
                now_s,
            )
        call.service.lengths.learn(call.prompt, usage.prompt_tokens)
        account = call.account
        account.bytes_per_token = learnt(account.bytes_per_token, call.prompt, usage.prompt_tokens)
        if not call.estimate.has_limit and generated is None:
            account.learn_output(usage.completion_tokens / call.estimate.sequences)

    def _learn_ttft(self, outcome: RequestOutcome, ttft_s: float) -> None:
        """Compare the predicted time to first token with the measured one."""
        choice, record = outcome.choice, outcome.record
        assert choice is not None
        assert record is not None
        record.ttft_s = ttft_s
        labels = (outcome.call.service.model, choice.replica.name)
        self._metrics.predicted_ttft.add(labels, choice.predicted_ttft_s)
        self._metrics.actual_ttft.add(labels, ttft_s)
        self._metrics.ttft_error.observe(labels, abs(ttft_s - choice.predicted_ttft_s))
        choice.replica.load.learn(choice.tokens_ahead, ttft_s)

    def _bill(self, outcome: RequestOutcome, record: AttemptRecord, duration_s: float) -> None:
        """Enter the request's usage into the ledger, or that it is unknown."""
        call = outcome.call
        model = call.service.model
        generated = record.completion_tokens
        if generated is None:
            if outcome.status in (200, CLIENT_GONE) or outcome.is_cut_short:
                self._ledger.enter_unmetered(call.key_name, model)
            return
        if outcome.usage is None or generated > outcome.usage.completion_tokens:
            self._ledger.enter_estimate(call.key_name, model, record.prompt_tokens, generated)
            return
        self._ledger.enter(call.key_name, model, record.prompt_tokens, outcome.usage.cached_tokens, generated)
        if call.is_stream and outcome.first_event_s is not None and generated > 1:
            itl_s = (duration_s - outcome.first_event_s) / (generated - 1)
            self._metrics.itl.observe((model,), itl_s)
            if call.service.sides is not None and outcome.choice is not None and not outcome.migrations:
                revision = outcome.choice.replica.revision
                call.service.sides.observe_itl(revision, itl_s, time.monotonic())


def _tokens_used(outcome: RequestOutcome, now: float) -> int:
    """Return the tokens charged for a request that was sent: its usage; an estimate of what was computed if the answer
    reported none; zero for an error, unless the replica computed until the request's time had passed."""
    record, choice, estimate = outcome.record, outcome.choice, outcome.call.estimate
    if record is not None and record.completion_tokens is not None:
        return estimate.used(record.prompt_tokens, record.completion_tokens)
    if choice is None or (outcome.status not in (200, CLIENT_GONE) and not outcome.is_cut_short):
        return 0
    if outcome.is_cut_short and outcome.call.is_stream:
        return estimate.prompt_tokens  # it has generated nothing: a stream's first token would have been seen
    replica = choice.replica
    max_tokens = replica.hello.max_model_len if replica.hello is not None else MAX_TOKENS
    generating_s = now - outcome.sent_at - choice.predicted_ttft_s
    return estimate.generated_in(generating_s, replica.load.decode_step_s, max_tokens)


def _recorded(call: Call, record: AttemptRecord, arrival_s: float) -> CapturedRequest:
    """Make the entry of the trace capture; the chunks' ends are estimates, scaled to the prompt's true length."""
    estimated = call.service.lengths.tokens(call.prompt)
    scale = record.prompt_tokens / estimated
    ends = [
        min(record.prompt_tokens, int(end * scale)) for end in call.service.lengths.chunk_ends(call.prompt)
    ]
    return CapturedRequest(
        arrival_s, record.prompt_tokens, record.completion_tokens or 0, call.prompt.hashes, ends
    )


def _access_entry(outcome: RequestOutcome, duration_s: float) -> AccessEntry:
    call, choice, record = outcome.call, outcome.choice, outcome.record
    entry = AccessEntry(
        time.time(),
        call.request_id.decode(),
        outcome.status,
        call.key_name,
        call.service.model,
        error=outcome.error,
    )
    entry.attempts = outcome.attempts
    entry.migrations = outcome.migrations
    entry.duration_ms = duration_s * 1000.0
    if outcome.queued_s:
        entry.queue_ms = outcome.queued_s * 1000.0
    if outcome.first_event_s is not None:
        entry.ttft_ms = outcome.first_event_s * 1000.0
    if choice is not None and record is not None:
        entry.replica = choice.replica.name
        entry.route = choice.decision.reason
        entry.predicted_tokens = choice.decision.predicted_tokens
        entry.cached_tokens = record.cached_tokens
        entry.completion_tokens = record.completion_tokens
        if record.cached_tokens is not None:
            entry.prompt_tokens = record.prompt_tokens
    return entry

"""Request accounting: turns the outcome of each request into metrics, log lines and usage.

Owns: the request metrics, the rings of decision records and refusals, and what the access log, the usage ledger, the
capture and traces are told.
Must not know: exchanges, connections, retries, how a replica is chosen.
Invariant: `close` is called once per request, when nothing can change its outcome any more; so a request that was
retried or migrated is counted, logged and billed once.
"""

from __future__ import annotations

import time

from argosy_protocol.errors import ErrorReason
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Choice
from argosy_router.metrics.registry import Metrics
from argosy_router.observability.access_log import AccessEntry, AccessLog
from argosy_router.observability.trace_capture import CapturedRequest, TraceCapture
from argosy_router.observability.usage_ledger import UsageLedger
from argosy_router.prompts.prompt_length_model import learnt
from argosy_router.proxy.accounting.outcome import CLIENT_GONE, RequestOutcome
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.upstream.attempt_log import (
    AttemptLog,
    AttemptRecord,
    HedgeOutcome,
    RefusalLog,
    RefusedRequest,
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
        self.attempt_log = AttemptLog()
        self.refusal_log = RefusalLog()

    def usage_of(self, key: str) -> bytes:
        """Render what the key of this name has used in Prometheus' text format."""
        return self._ledger.render(key)

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

    def close(self, outcome: RequestOutcome, duration_s: float) -> None:
        """Account for a request that has ended."""
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

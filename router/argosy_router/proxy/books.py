"""What is written down about a request: metrics, decision, usage, access line.

Owns: which event changes which figure. Must not know: connections, retries, how a replica is chosen.
Invariant: `close` is called once per request, when nothing can change it any more; so a retried or migrated request is
counted, logged and billed once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from argosy_router.fleet.service import Choice
from argosy_router.metrics.registry import Metrics
from argosy_router.proxy.call import Call
from argosy_router.proxy.decisions import DecisionLog, DecisionRecord
from argosy_router.proxy.usage import TokenUsage
from argosy_router.records.access_log import AccessEntry, AccessLog
from argosy_router.records.recorder import Recorded, Recorder
from argosy_router.records.usage_ledger import UsageLedger

if TYPE_CHECKING:
    from argosy_router.proxy.exchange import Exchange

CLIENT_GONE = 499
"""nginx's status for a client that left before its answer began."""


class Books:
    """Shared by all requests of one router."""

    def __init__(
        self,
        metrics: Metrics,
        access_log: AccessLog,
        ledger: UsageLedger,
        *,
        recorder: Recorder | None = None,
        policy: str = "",
    ) -> None:
        """`policy` is the router's own, which overrides the services'; empty for none."""
        self._metrics = metrics
        self._access_log = access_log
        self._ledger = ledger
        self._recorder = recorder
        self._policy = policy
        self.decisions = DecisionLog()

    def usage_of(self, key: str) -> bytes:
        """What the key of this name has used, as Prometheus reads it."""
        return self._ledger.render(key)

    def dispatched(self, call: Call, choice: Choice, attempt: int) -> DecisionRecord:
        """An attempt is being sent."""
        model, replica, decision = call.service.model, choice.replica, choice.decision
        self._metrics.routes.add((model, replica.name, decision.reason, replica.link))
        record = DecisionRecord(
            time.time(),
            call.request_id.decode(),
            model,
            replica.name,
            decision.reason,
            attempt,
            choice.uncached_tokens + decision.predicted_tokens,
            decision.predicted_tokens,
            choice.predicted_ttft_s,
            decision.cost_s,
            replica.link,
        )
        self.decisions.add(record)
        return record

    def measured(self, call: Call, choice: Choice, record: DecisionRecord, usage: TokenUsage) -> None:
        """The answer told its token counts."""
        record.prompt_tokens = usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        record.completion_tokens = usage.completion_tokens
        labels = (call.service.model, choice.replica.name)
        self._metrics.prompt_tokens.add(labels, usage.prompt_tokens)
        self._metrics.completion_tokens.add(labels, usage.completion_tokens)
        self._metrics.predicted.add(labels, choice.decision.predicted_tokens)
        self._metrics.actual.add(labels, usage.cached_tokens)
        call.service.learn(call.prompt, usage.prompt_tokens)
        if not call.estimate.has_limit:
            call.account.learn_output(usage.completion_tokens / call.estimate.sequences)

    def counted(self, record: DecisionRecord, tokens: int) -> None:
        """The answer, or what the client has of it, tells no counts; it was sent so many tokens."""
        record.completion_tokens = tokens

    def close(self, exchange: Exchange, duration_s: float) -> None:
        """The request has ended, however it did."""
        call, record = exchange.call, exchange.record
        model, metrics = call.service.model, self._metrics
        metrics.requests.add((model, str(exchange.status)))
        metrics.duration.observe((model,), duration_s)
        if call.canary_of is not None:
            metrics.canaried.add((call.canary_of.model, call.service.name))
        if exchange.first_event_s is not None:
            metrics.ttft.observe((model,), exchange.first_event_s)
            is_first = record is not None and record.attempt == 1
            if call.is_stream and is_first and exchange.status == 200:
                self._calibrate(exchange, exchange.first_event_s - exchange.waited_s)
        if record is not None:
            record.status = exchange.status
            self._bill(exchange, record, duration_s)
            if self._recorder is not None:
                self._recorder.add(_recorded(call, record, time.time() - duration_s))
        if self._access_log.is_enabled or call.trace is not None:
            entry = _entry(exchange, duration_s)
            if self._access_log.is_enabled:
                self._access_log.write(entry)
            if call.trace is not None:
                expected_s = None if record is None else record.predicted_ttft_s
                call.trace.end(entry, self._policy or call.service.spec.policy, expected_s)

    def refuse(self, request_id: bytes, status: int) -> None:
        """A request got an error before it became a call."""
        self._metrics.requests.add(("", str(status)))
        if self._access_log.is_enabled:
            self._access_log.write(AccessEntry(time.time(), request_id.decode(), status))

    def _calibrate(self, exchange: Exchange, ttft_s: float) -> None:
        """Holds the prediction against what happened."""
        choice, record = exchange.choice, exchange.record
        assert choice is not None
        assert record is not None
        record.ttft_s = ttft_s
        labels = (exchange.call.service.model, choice.replica.name)
        self._metrics.predicted_ttft.add(labels, choice.predicted_ttft_s)
        self._metrics.actual_ttft.add(labels, ttft_s)
        self._metrics.ttft_error.observe(labels, abs(ttft_s - choice.predicted_ttft_s))
        choice.replica.load.learn(choice.tokens_ahead, ttft_s)

    def _bill(self, exchange: Exchange, record: DecisionRecord, duration_s: float) -> None:
        call = exchange.call
        model = call.service.model
        generated = record.completion_tokens
        if generated is None:
            if exchange.status in (200, CLIENT_GONE):
                self._ledger.enter_unmetered(call.key_name, model)
            return
        if record.cached_tokens is None:
            self._ledger.enter_estimate(call.key_name, model, record.prompt_tokens, generated)
            return
        self._ledger.enter(call.key_name, model, record.prompt_tokens, record.cached_tokens, generated)
        if call.is_stream and exchange.first_event_s is not None and generated > 1:
            self._metrics.itl.observe((model,), (duration_s - exchange.first_event_s) / (generated - 1))


def _recorded(call: Call, record: DecisionRecord, arrival_s: float) -> Recorded:
    """Chunk ends are estimates, stretched to the prompt's true length."""
    estimated = call.service.estimate_tokens(call.prompt)
    scale = record.prompt_tokens / estimated
    ends = [min(record.prompt_tokens, int(end * scale)) for end in call.service.estimate_chunks(call.prompt)]
    return Recorded(arrival_s, record.prompt_tokens, record.completion_tokens or 0, call.prompt.hashes, ends)


def _entry(exchange: Exchange, duration_s: float) -> AccessEntry:
    call, choice, record = exchange.call, exchange.choice, exchange.record
    entry = AccessEntry(
        time.time(), call.request_id.decode(), exchange.status, call.key_name, call.service.model
    )
    entry.attempts = exchange.attempts
    entry.migrations = exchange.migrations
    entry.duration_ms = duration_s * 1000.0
    if exchange.waited_s:
        entry.queue_ms = exchange.waited_s * 1000.0
    if exchange.first_event_s is not None:
        entry.ttft_ms = exchange.first_event_s * 1000.0
    if choice is not None and record is not None:
        entry.replica = choice.replica.name
        entry.route = choice.decision.reason
        entry.predicted_tokens = choice.decision.predicted_tokens
        entry.cached_tokens = record.cached_tokens
        entry.completion_tokens = record.completion_tokens
        if record.cached_tokens is not None:
            entry.prompt_tokens = record.prompt_tokens
    return entry

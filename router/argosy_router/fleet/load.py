"""How much work a replica has: what it reports, corrected by what we sent since.

Owns: the in-flight account and the rates of one replica; it is what policies see of it (`policy.Candidate`).
Must not know: how the figures are weighed against a request.
Invariants: every charge is discharged exactly once, whatever becomes of its request (`Charge.release` is the only way
out and counts only once); the figures policies read are plain attributes, brought up to date by whoever changes one,
because a decision reads those of all replicas and a request changes those of one.

A report is up to a heartbeat old and sums all routers' work. Two decisions a millisecond apart must not collide, so
own dispatches count at once: estimate = max(own recent, reported + own change since the report). Own prompts charged
before the last report but one are in the reports: only a queue that stands still could still hold them, and it says so.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy_router.policy.base import Candidate
from argosy_router.policy.rates import PRIOR, PRIOR_MAX_NUM_SEQS, Rates
from argosy_router.policy.waiting import waiting_s

_UNMEASURED = Rates(0.0, 0.0)
_LEARNING_RATE = 0.2
MIN_LESSON_TOKENS = 256
"""Below this, time to first token says more about the network than about the replica."""


class LoadAccount(Candidate):
    """Queued prompt tokens, requests and rates of one replica."""

    __slots__ = (
        "_assumed",
        "_generation",
        "_has_report",
        "_is_measuring",
        "_measured",
        "_on_measured",
        "_open_tokens",
        "_recent_tokens",
        "_sequence_change",
        "_token_change",
        "inflight",
        "inflight_sequences",
        "inflight_tokens",
        "reported_requests",
        "reported_tokens",
    )

    def __init__(self, name: str = "", on_measured: Callable[[], None] | None = None) -> None:
        """`on_measured` is called when a rate becomes known: what its peers are taken for may rest on it."""
        super().__init__(name, PRIOR.prefill_tokens_per_s, PRIOR.decode_step_s, PRIOR_MAX_NUM_SEQS)
        self.inflight = 0
        """Own requests without an end yet."""
        self.inflight_sequences = 0
        """Sequences that these generate side by side: each choice, prompt of a batch and beam takes a seat."""
        self.inflight_tokens = 0
        """Uncached prompt tokens of own requests without a first token yet."""
        self.reported_requests = 0
        """An engine counts each sequence as a request of its own."""
        self.reported_tokens = 0
        self._measured = _UNMEASURED
        self._on_measured = on_measured
        self._assumed = PRIOR
        self._has_report = False
        self._is_measuring = False
        """Whether its reports tell its prefill rate."""
        self._generation = 0
        """Number of reports so far."""
        self._recent_tokens = 0
        """Uncached tokens of own requests charged since the last report and without a first token."""
        self._open_tokens = 0
        """The same, since the report before it."""
        self._token_change = 0
        self._sequence_change = 0

    @property
    def measured(self) -> Rates:
        """What the replica, or its answers, told about its speed."""
        return self._measured

    @property
    def has_seat(self) -> bool:
        """Whether one more request would run at once, as far as is known."""
        return self.requests < self.max_num_seqs

    def charge(self, tokens: int, sequences: int = 1) -> Charge:
        """Accounts for a request about to be sent, which generates so many sequences."""
        self.inflight += 1
        self.inflight_sequences += sequences
        self._sequence_change += sequences
        self.inflight_tokens += tokens
        self._recent_tokens += tokens
        self._open_tokens += tokens
        self._token_change += tokens
        self._refresh()
        return Charge(self, tokens, sequences, self._generation)

    def report(
        self,
        *,
        requests: int,
        tokens: int,
        kv_usage: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
        decode_step_s: float = 0.0,
    ) -> None:
        """The replica's own figures, which include what we charged before. Rates of zero are not measured yet."""
        self.reported_requests = requests
        self.reported_tokens = tokens
        self.kv_usage = kv_usage
        self._has_report = True
        self._is_measuring = prefill_tokens_per_s > 0.0
        self._generation += 1
        self._open_tokens = self._recent_tokens
        self._recent_tokens = 0
        self._token_change = 0
        self._sequence_change = 0
        known = self._measured
        self._measure(
            Rates(prefill_tokens_per_s or known.prefill_tokens_per_s, decode_step_s or known.decode_step_s)
        )

    def forget(self) -> None:
        """The replica's figures are void (stream lost, restarted): only our own account counts. Rates stay: the
        hardware did not change."""
        self.report(requests=0, tokens=0)
        self._has_report = False
        self._refresh()

    def assume(self, rates: Rates) -> None:
        """What to take the replica for as far as nothing is measured."""
        if rates != self._assumed:
            self._assumed = rates
            self._apply_rates()

    def learn(self, tokens: int, seconds: float) -> None:
        """An answer's first token came after `seconds`, with `tokens` to compute until then. For replicas that report
        no rates: their reports win."""
        if self._is_measuring or tokens < MIN_LESSON_TOKENS or seconds <= 0.0:
            return
        rate = tokens / seconds
        known = self._measured.prefill_tokens_per_s or rate
        self._measure(self._measured._replace(prefill_tokens_per_s=known + _LEARNING_RATE * (rate - known)))

    def _measure(self, rates: Rates) -> None:
        before, self._measured = self._measured, rates
        self._apply_rates()
        is_news = (rates.prefill_tokens_per_s and not before.prefill_tokens_per_s) or (
            rates.decode_step_s and not before.decode_step_s
        )
        if is_news and self._on_measured is not None:
            self._on_measured()

    def _apply_rates(self) -> None:
        self.prefill_tokens_per_s = self._measured.prefill_tokens_per_s or self._assumed.prefill_tokens_per_s
        self.decode_step_s = self._measured.decode_step_s or self._assumed.decode_step_s
        self._refresh()

    def _refresh(self) -> None:
        if self._has_report:
            tokens = self.reported_tokens + self._token_change
            requests = self.reported_requests + self._sequence_change
            self.queued_tokens = tokens if tokens > self._open_tokens else self._open_tokens
            self.requests = requests if requests > self.inflight_sequences else self.inflight_sequences
        else:
            self.queued_tokens = self.inflight_tokens
            self.requests = self.inflight_sequences
        self.wait_s = waiting_s(self)

    def discharge(self, tokens: int, generation: int, *, ended_sequences: int = 0) -> None:
        """Undoes (part of) a charge; for `Charge` alone. `ended_sequences` are those of a request that is over."""
        self.inflight_tokens -= tokens
        age = self._generation - generation
        if age <= 1:
            self._token_change -= tokens
            self._open_tokens -= tokens
            if age == 0:
                self._recent_tokens -= tokens
        if ended_sequences:
            self.inflight -= 1
            self.inflight_sequences -= ended_sequences
            self._sequence_change -= ended_sequences
        self._refresh()


class Charge:
    """One dispatched request on one replica's account."""

    __slots__ = ("_account", "_generation", "_is_open", "_sequences", "_tokens")

    def __init__(self, account: LoadAccount, tokens: int, sequences: int, generation: int) -> None:
        self._account = account
        self._tokens = tokens
        self._sequences = sequences
        self._generation = generation
        self._is_open = True

    def first_token(self) -> None:
        """The prompt is computed: its tokens no longer queue."""
        if self._tokens:
            tokens, self._tokens = self._tokens, 0
            self._account.discharge(tokens, self._generation)

    def release(self) -> None:
        """The request is over, however it ended."""
        if self._is_open:
            self._is_open = False
            tokens, self._tokens = self._tokens, 0
            self._account.discharge(tokens, self._generation, ended_sequences=self._sequences)

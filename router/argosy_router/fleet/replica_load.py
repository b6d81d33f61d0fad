"""Load of a replica: what it reports, corrected by what this router has sent since.

Owns: the charges in flight and the rates of one replica; it is the `policy.Candidate` that policies see.
Must not know: how the figures are weighed against a request.
Invariants: every charge is released exactly once, whatever becomes of its request (`Charge.release` may be called
more often, but counts once). The figures that policies read are plain attributes, updated by every change, because a
decision reads all replicas, and reads are far more frequent than changes.

Figures of a replica with data parallelism are those of one of its cores (`queued_tokens`, rates), or of all (requests
and slots).

A report is up to a heartbeat old and includes all routers' work. Decisions a millisecond apart must see each other, so
own dispatches count at once: estimate = max(own recent, reported + own change since the report). "Own recent" leaves
out prompts charged two or more reports ago: if they are still queued, the report includes them.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy_router.policy.policy_interface import Candidate
from argosy_router.policy.rate_priors import PRIOR, PRIOR_MAX_NUM_SEQS, Rates
from argosy_router.policy.wait_model import waiting_s

_UNMEASURED = Rates(0.0, 0.0)
_LEARNING_RATE = 0.2
MIN_SAMPLE_TOKENS = 256
"""For shorter prompts, the time to first token says more about the network than about the replica."""


class ReplicaLoad(Candidate):
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
        "_yielding_by_account",
        "_yielding_change",
        "changes",
        "data_parallel_size",
        "inflight",
        "inflight_sequences",
        "inflight_tokens",
        "reported_requests",
        "reported_tokens",
        "reported_yielding",
        "yielding",
    )

    def __init__(self, name: str = "", on_measured: Callable[[], None] | None = None) -> None:
        """`on_measured` is called on the first measurement of a rate, so that the rates assumed for unmeasured replicas
        can be recomputed."""
        super().__init__(name, PRIOR.prefill_tokens_per_s, PRIOR.decode_step_s, PRIOR_MAX_NUM_SEQS)
        self.changes: set[ReplicaLoad] | None = None
        """Set by whoever wants to know: gets this load whenever it has changed."""
        self.data_parallel_size = 1
        """Engine cores of the replica, which compute prompts side by side."""
        self.inflight = 0
        """This router's requests that have not ended."""
        self.inflight_sequences = 0
        """Sequences of these requests: each choice, prompt of a batch and beam takes a slot in the engine's batch."""
        self.inflight_tokens = 0
        """Uncached prompt tokens of own requests that have no first token yet."""
        self.reported_requests = 0
        """Requests that the replica reported; an engine counts each sequence as a request of its own."""
        self.reported_tokens = 0
        self.reported_yielding = 0
        """Of the reported requests, sequences of calls with several."""
        self.yielding = 0
        """Estimate of these sequences now: the engine takes batch slots from them for other calls."""
        self._yielding_by_account: dict[object, int] = {}
        """Those of this router's requests."""
        self._yielding_change = 0
        self._measured = _UNMEASURED
        self._on_measured = on_measured
        self._assumed = PRIOR
        self._has_report = False
        self._is_measuring = False
        """Whether the replica reports its prefill rate."""
        self._generation = 0
        """Number of reports so far."""
        self._recent_tokens = 0
        """Uncached tokens of own requests charged since the last report and without a first token."""
        self._open_tokens = 0
        """The same since the report before the last one."""
        self._token_change = 0
        self._sequence_change = 0

    @property
    def measured(self) -> Rates:
        """Rates that the replica reported or that were learnt from its answers; zero where unknown."""
        return self._measured

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence would join the engine's batch at once, by the current estimate."""
        return self.requests < self.max_num_seqs

    def yielding_to(self, account: object) -> int:
        """Return the sequences in calls with several of other accounts, or of any account at other routers."""
        return self.yielding - self._yielding_by_account.get(account, 0) if self.yielding else 0

    def charge(self, tokens: int, sequences: int = 1, account: object = None) -> Charge:
        """Charge a request that is about to be sent, with its uncached prompt tokens and number of sequences."""
        if sequences > 1:
            self._yielding_by_account[account] = self._yielding_by_account.get(account, 0) + sequences
            self._yielding_change += sequences
        self.inflight += 1
        self.inflight_sequences += sequences
        self._sequence_change += sequences
        self.inflight_tokens += tokens
        self._recent_tokens += tokens
        self._open_tokens += tokens
        self._token_change += tokens
        self._refresh()
        return Charge(self, tokens, sequences, self._generation, account)

    def report(
        self,
        *,
        requests: int,
        tokens: int,
        kv_usage: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
        decode_step_s: float = 0.0,
        yielding: int = 0,
    ) -> None:
        """Take over the replica's own figures, which include earlier charges. A rate of zero is unknown."""
        self.reported_requests = requests
        self.reported_tokens = tokens
        self.reported_yielding = yielding
        self.kv_usage = kv_usage
        self._has_report = True
        self._is_measuring = prefill_tokens_per_s > 0.0
        self._generation += 1
        self._open_tokens = self._recent_tokens
        self._recent_tokens = 0
        self._token_change = 0
        self._sequence_change = 0
        self._yielding_change = 0
        known = self._measured
        self._measure(
            Rates(prefill_tokens_per_s or known.prefill_tokens_per_s, decode_step_s or known.decode_step_s)
        )

    def forget(self) -> None:
        """Drop the replica's figures (stream lost, replica restarted), so that only the router's own charges count.
        Rates stay, as the hardware has not changed."""
        self.report(requests=0, tokens=0)
        self._has_report = False
        self._refresh()

    def assume(self, rates: Rates) -> None:
        """Set the rates to assume where nothing is measured."""
        if rates != self._assumed:
            self._assumed = rates
            self._apply_rates()

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn the prefill rate from an answer whose first token came after `seconds`, with `tokens` to compute until
        then. Ignored for replicas that report their rate."""
        if self._is_measuring or tokens < MIN_SAMPLE_TOKENS or seconds <= 0.0:
            return
        rate = tokens / seconds
        known = self._measured.prefill_tokens_per_s or rate
        self._measure(self._measured._replace(prefill_tokens_per_s=known + _LEARNING_RATE * (rate - known)))

    def _measure(self, rates: Rates) -> None:
        before, self._measured = self._measured, rates
        self._apply_rates()
        is_first = (rates.prefill_tokens_per_s and not before.prefill_tokens_per_s) or (
            rates.decode_step_s and not before.decode_step_s
        )
        if is_first and self._on_measured is not None:
            self._on_measured()

    def _apply_rates(self) -> None:
        self.prefill_tokens_per_s = self._measured.prefill_tokens_per_s or self._assumed.prefill_tokens_per_s
        self.decode_step_s = self._measured.decode_step_s or self._assumed.decode_step_s
        self._refresh()

    def _refresh(self) -> None:
        if self._has_report:
            tokens = self.reported_tokens + self._token_change
            requests = self.reported_requests + self._sequence_change
            tokens = tokens if tokens > self._open_tokens else self._open_tokens
            self.requests = requests if requests > self.inflight_sequences else self.inflight_sequences
        else:
            tokens = self.inflight_tokens
            self.requests = self.inflight_sequences
        # The replica sends a request to its core with the least work.
        self.queued_tokens = tokens if self.data_parallel_size == 1 else tokens // self.data_parallel_size
        if self.yielding or self._yielding_by_account or self.reported_yielding:
            own = sum(self._yielding_by_account.values())
            self.yielding = max(own, self.reported_yielding + self._yielding_change)
        self.wait_s = waiting_s(self)
        if self.changes is not None:
            self.changes.add(self)

    def discharge(
        self, tokens: int, generation: int, *, ended_sequences: int = 0, account: object = None
    ) -> None:
        """Undo (part of) a charge; called only by `Charge`. `ended_sequences` are those of a request that has ended."""
        if ended_sequences > 1:
            left = self._yielding_by_account.pop(account) - ended_sequences
            if left:
                self._yielding_by_account[account] = left
            self._yielding_change -= ended_sequences
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
    """One dispatched request on one replica's load."""

    __slots__ = ("_account", "_generation", "_is_open", "_load", "_sequences", "_tokens")

    def __init__(
        self, load: ReplicaLoad, tokens: int, sequences: int, generation: int, account: object
    ) -> None:
        self._account = account
        self._load = load
        self._tokens = tokens
        self._sequences = sequences
        self._generation = generation
        self._is_open = True

    def first_token(self) -> None:
        """Discharge the prompt tokens: the prompt is computed."""
        if self._tokens:
            tokens, self._tokens = self._tokens, 0
            self._load.discharge(tokens, self._generation)

    def release(self) -> None:
        """Discharge the rest: the request has ended."""
        if self._is_open:
            self._is_open = False
            tokens, self._tokens = self._tokens, 0
            self._load.discharge(
                tokens, self._generation, ended_sequences=self._sequences, account=self._account
            )

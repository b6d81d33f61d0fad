"""One replica as the router sees it.

Owns: identity, connection pool, the key that it is sent, load, health, cached prefixes and what they are worth, and the
state shown to operators. Must not know: what updates any of them.
Invariant: `Replica.is_routable` is the one place that decides whether a replica may get requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from math import exp, isnan
from typing import Final, NamedTuple, Protocol

from argosy_protocol.reports import ReplicaReport, ReplicaState
from argosy_protocol.telemetry import Hello
from argosy_router.fleet.health import ReplicaHealth
from argosy_router.http.upstream import ConnectionPool, UpstreamError
from argosy_router.policy import PRIOR, PRIOR_MAX_NUM_SEQS, Candidate, Rates, waiting_s
from argosy_router.prefixes import ReplicaPrefixes, ServedName, Side

_UNMEASURED = Rates(0.0, 0.0)
_LEARNING_RATE = 0.2
MIN_SAMPLE_TOKENS = 256
"""For shorter prompts, the time to first token says more about the network than about the replica."""


class ReplicaLoad(Candidate):
    """Queued prompt tokens, requests and rates of one replica."""

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


MAX_REQUESTS: Final = 1_000_000
"""Sequences at one replica."""
MAX_TOKENS: Final = 1_000_000_000
"""Prompt tokens that wait there."""
MAX_REPORTED_CORES: Final = 1024
MAX_RATE: Final = 1e9
"""Tokens per second."""
MAX_SECONDS: Final = 86_400.0
"""Of a step, or since one."""


def bounded_count(reported: int, most: int) -> int:
    """A whole number from 0 to `most`."""
    return 0 if reported < 0 else most if reported > most else reported


def bounded_number(reported: float, most: float) -> float:
    """A number from 0 to `most`; 0 in place of what is none."""
    if isnan(reported) or reported < 0.0:
        return 0.0
    return most if reported > most else reported


def bounded_rate(reported: float, least: float, most: float) -> float:
    """A rate or duration that is divided by, or by whose inverse: 0, which stands for unknown, or at least `least`."""
    bounded = bounded_number(reported, most)
    return bounded if bounded >= least else 0.0


CACHE_VALUE_WINDOW_S: Final = 600.0
"""Time constant of the decay. Conversations pause for minutes; what was not used for half an hour has no value left."""


def hit_value(hits: dict[int, int], position: int) -> float:
    """Value of a hit, in tokens.

        (own - other) + other / holders

    with `own` the cached tokens at the chosen replica, `other` the longest prefix of the prompt at any other replica,
    and `holders` the number of replicas that hold some prefix of it. A conversation that only one replica knows counts
    in full; a system prompt that all of them hold counts little, because removing one replica does not lose it.

    Args:
        hits: cached tokens of the prompt by position of the replica.
        position: that of the chosen replica.
    """
    own = hits.get(position, 0)
    if not own:
        return 0.0
    other = 0
    for each, tokens in hits.items():
        if each != position and tokens > other:
            other = tokens
    other = min(own, other)
    return own - other + other / len(hits)


class CacheValue:
    """Recent value of one replica's cache: prompt tokens that it has saved of late and that no other cache would
    have."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._time = 0.0

    def add(self, tokens: float, now: float) -> None:
        """Count a hit of this value."""
        self._sum = self._sum * exp((self._time - now) / CACHE_VALUE_WINDOW_S) + tokens
        self._time = now

    def rate(self, now: float) -> float:
        """Tokens saved per second, averaged over about CACHE_VALUE_WINDOW_S."""
        return self._sum * exp((self._time - now) / CACHE_VALUE_WINDOW_S) / CACHE_VALUE_WINDOW_S


class ServiceKeys:
    """The keys of a service's engines, newest first; empty if they require none."""

    def __init__(self, *keys: str) -> None:
        self._keys: tuple[str, ...] = tuple(key for key in keys if key)

    @property
    def all(self) -> tuple[str, ...]:
        return self._keys

    @property
    def newest(self) -> str:
        """The newest key; empty for none."""
        return self._keys[0] if self._keys else ""

    def replace(self, keys: tuple[str, ...]) -> None:
        self._keys = keys


class ReplicaKey:
    """The bearer key that the router sends to one replica, while the fleet key is rotated.

    Invariants: a replica gets the key that it accepted last, even one that the service has no more; after a refusal the
    next one is tried, each once per request. A newer key is used once the replica has accepted it
    (`server.KeyRotation`), so that gateways, which cannot try again, are given one that works.
    """

    def __init__(self, service: ServiceKeys) -> None:
        self._service = service
        self.current = service.newest
        """The key to send; empty for none."""
        self.is_refused = False
        """Whether the replica refused every key when it was last asked for telemetry."""

    @property
    def newest(self) -> str:
        """The service's newest key; empty for none."""
        return self._service.newest

    @property
    def is_newest(self) -> bool:
        return self.current == self._service.newest

    def refused(self, key: str, tried: Collection[str]) -> bool:
        """Note that the replica refused `key`. Returns whether `current` is one to try now. `tried`: keys that the
        request was sent with, `key` included."""
        if self.current == key:
            keys = self._service.all
            position = keys.index(key) + 1 if key in keys else 0
            if not keys:
                return False
            self.current = keys[position % len(keys)]
        return self.current not in tried


class Member(NamedTuple):
    """A replica as discovery reports it."""

    name: str
    uid: str
    url: str
    is_draining: bool = False
    hostname: str = ""
    """The replica's name, as on its certificate, if `url` has only its address."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves besides its model."""
    aliases: tuple[str, ...] = ()
    """Further names of its model that it accepts."""
    revision: str = ""
    """Hash of the pod template that it was created from; empty if that is not known."""


class InflightAttempt(Protocol):
    """An attempt in flight, which can be moved to another replica."""

    def core_stalled(self, age_s: float, bound_s: float) -> None:
        """Called when the replica's core has run no step for `age_s`, which is more than `bound_s`."""
        ...


class Replica:
    """One member of a service."""

    def __init__(
        self,
        service: str,
        member: Member,
        pool: ConnectionPool,
        prefixes: ReplicaPrefixes,
        on_measured: Callable[[], None] | None = None,
        key: ReplicaKey | None = None,
    ) -> None:
        """`on_measured` is passed to `ReplicaLoad`; without a `key` none is sent."""
        self.service = service
        self.name = member.name
        self.uid = member.uid
        self.url = member.url
        self.endpoint = endpoint_of(member.url)
        """HOST:PORT, as gateways name endpoints."""
        self.name_header = b"x-argosy-replica: %b\r\nx-argosy-service: %b\r\n" % (
            member.name.encode("latin-1", "replace"),
            service.encode("latin-1", "replace"),
        )
        self.pool = pool
        self.key = key or ReplicaKey(ServiceKeys())
        self.load = ReplicaLoad(member.name, on_measured)
        self.health = ReplicaHealth()
        self.prefixes = prefixes
        self.cache_value = CacheValue()
        self.names = frozenset((*member.adapters, *member.aliases))
        """Adapters and aliases, which it serves besides its model's own name."""
        self.side: Side = ""
        """Of a canary rollout; empty without one, and for a revision that is on neither side."""
        self.revision = member.revision
        self.is_draining = member.is_draining
        """Whether discovery reports it as draining (pod being deleted, rollout of a local fleet)."""
        self.has_announced_drain = False
        """Whether the replica itself has announced that it is draining."""
        self.link: ReplicaState = "connecting"
        """State of the telemetry stream: connecting, synced, stale or foreign."""
        self.hello: Hello | None = None
        self.heard_at: float | None = None
        """Monotonic time of the last heartbeat; None before the first."""
        self.inflight_attempts: set[InflightAttempt] = set()
        """Attempts that were sent to it and have not ended."""
        self.was_tried = False
        """Whether an attempt to reach it has ended, well or not."""
        self.syncs = 0
        """Telemetry snapshots applied: one per connection, if nothing is lost."""

    @property
    def is_routable(self) -> bool:
        """Whether requests may be sent to it, ejections aside."""
        if self.is_draining or self.has_announced_drain:
            return False
        if self.link == "foreign":
            return self.health.is_answering
        return self.link != "connecting"

    def note_tried(self) -> bool:
        """Note that an attempt to reach it has ended. Return whether it was the first."""
        is_first, self.was_tried = not self.was_tried, True
        return is_first

    @property
    def has_work(self) -> bool:
        """Whether it has reported requests, or this router has attempts in flight there."""
        return self.load.reported_requests > 0 or bool(self.inflight_attempts)

    @property
    def is_stalled(self) -> bool:
        """Whether, by the last heartbeat, its core has work but has run no step for too long."""
        return self.health.is_core_overdue and self.has_work

    @property
    def is_computing(self) -> bool:
        """Whether it currently reports that it is working on requests."""
        if self.link not in ("synced", "foreign") or not self.is_routable:
            return False
        return self.load.reported_requests > 0 and not self.is_stalled

    def serves(self, name: ServedName) -> bool:
        """Whether it can answer as this adapter or alias, on this side; endpoints are the caller's to compare."""
        return (not name.name or name.name in self.names) and name.side in ("", self.side)

    @property
    def is_available(self) -> bool:
        """Whether it is routable and not ejected."""
        return self.is_routable and not self.health.is_ejected

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; replicas with the same one can continue each other's streams. Empty if unknown."""
        return self.hello.model_fingerprint if self.hello is not None and self.link != "foreign" else ""

    @property
    def is_argosy_engine(self) -> bool:
        """Whether the process at this address has identified itself as an Argosy engine."""
        return self.hello is not None and self.link != "foreign"

    @property
    def takes_model_names(self) -> bool:
        """Whether its answers use the model name that a header tells it the client used."""
        return self.hello is not None and self.hello.takes_model_name and self.link != "foreign"

    @property
    def announced_name(self) -> str:
        """Its own name for its model; empty if unknown."""
        return self.hello.model if self.hello is not None and self.link != "foreign" else ""

    @property
    def is_synced(self) -> bool:
        return self.link == "synced"

    @property
    def state(self) -> ReplicaState:
        """State for people: draining, connecting or the health condition if one applies, else the link."""
        if self.is_draining or self.has_announced_drain:
            return "draining"
        if self.link == "connecting":
            return "connecting"
        condition = self.health.condition(time.monotonic())
        return self.link if condition == "healthy" else condition

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            service=self.service,
            name=self.name,
            uid=self.uid,
            url=self.url,
            state=self.state,
            routable=self.is_available,
            epoch=self.hello.epoch if self.hello else "",
            inflight=self.load.inflight,
        )


def endpoint_of(url: str) -> str:
    """Return HOST:PORT of a URL."""
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0]
    has_port = ":" in authority.rpartition("]")[2]
    return authority if has_port else f"{authority}:{443 if scheme == 'https' else 80}"


class CoreStalled(UpstreamError):
    """The replica's engine core has not run a step for too long."""

    reason = "stalled"

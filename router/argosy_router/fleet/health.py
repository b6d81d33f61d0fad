"""Health of replicas: decides whether a replica is healthy, suspect, in cooldown or ejected, and how many may be
ejected.

Nothing else writes that state. Others report events: outlier detection how attempts ended, the telemetry client
heartbeats and silence, the poller of foreign replicas how polls ended.
Must not know: requests, telemetry frames, clocks, how a replica is chosen.
Invariants: a success ends an ejection. A replica that says that it is full is put in cooldown, which is no failure: it
neither ejects nor counts towards an ejection. A suspect replica is used only if no better one is left; silence or a
silent core makes it suspect, and any sign of life ends that. Failures eject at most half of a service's routable
replicas and never the last one; when replicas leave so that more than half of those left are ejected, ejections are
ignored (panic).

healthy --failures--> ejected --back-off over--> half-open (a probe request) --first event--> healthy
                         ^------------------------------- failure ---------------------'

Each event returns whether it changed which replicas may get requests, so that its caller can drop cached candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal

SUSPECT_STEP_AGE_S: Final = 15.0
"""A core that has not stepped for this long while its HTTP server reports is stuck in a kernel, or dead. Longer than a
long prefill step."""
MIN_STALL_S: Final = 5.0
"""A core that has work and has been silent for less is not stalled, however short its steps are: kernels are compiled,
and machines pause."""
STALL_STEPS: Final = 5.0
"""A core with work may be silent for this multiple of its longest recent step."""


def stall_bound_s(longest_step_s: float) -> float:
    """Return how long a core with work may be silent before its requests move to other replicas; `longest_step_s`: its
    longest recent step; zero if unknown."""
    if not longest_step_s:
        return SUSPECT_STEP_AGE_S
    return max(MIN_STALL_S, STALL_STEPS * longest_step_s)


CONSECUTIVE_FAILURES = 3
"""Gateway failures in a row (resets, missed first bytes, malformed answers) before ejection. One refused connection is
enough: no process listens."""
BASE_EJECTION_S = 1.0
"""The first ejection; each further one in a row doubles, up to `MAX_EJECTION_S`."""
MAX_EJECTION_S = 30.0
PROBE_S = 60.0
"""Time after which another request is sent as a probe although the last one has not ended. A unary answer of many
tokens takes minutes and shows nothing before its end; whoever asks for it must not keep the replica from all others."""


class ReplicaHealth:
    """Health of one replica. Times are a monotonic clock's, passed in."""

    def __init__(self) -> None:
        self.consecutive_failures = 0
        self._ejections = 0
        self._ejected_until: float | None = None
        self._is_probing = False
        self._next_probe = 0.0
        """When another probe may be sent while one is in flight."""
        self._is_on_probation = False
        """Whether an ejection has ended and no answer has been whole since: the next failure ejects again."""
        self._is_suspect = False
        self.cooldown_until = 0.0
        """End of the cooldown, during which the replica is used only if no other is left, because it said that it is
        full. In the past if the replica is not in cooldown."""
        self._cooldown_ends_with_capacity = False
        self.core_step_age_s = 0.0
        """Age of the core's last step at the last heartbeat."""
        self.stall_bound_s = SUSPECT_STEP_AGE_S
        """Age of the last step beyond which a core with work counts as stalled."""
        self.is_answering = False
        """For foreign replicas: whether `/health` succeeds."""

    @property
    def is_ejected(self) -> bool:
        return self._ejected_until is not None

    @property
    def is_suspect(self) -> bool:
        """Whether the replica is used only if no better one is left."""
        return self._is_suspect

    @property
    def is_healthy(self) -> bool:
        """Whether the replica is neither ejected nor suspect."""
        return self._ejected_until is None and not self._is_suspect

    @property
    def is_core_overdue(self) -> bool:
        """Whether its core, if it has work, has run no step for too long."""
        return self.core_step_age_s > self.stall_bound_s

    def condition(self, now: float) -> Literal["healthy", "suspect", "ejected", "half-open"]:
        """Describe the health for people. Half-open: the next request is a probe, or a probe has been sent."""
        if self._ejected_until is None:
            return "suspect" if self._is_suspect else "healthy"
        return "half-open" if now >= self._ejected_until else "ejected"

    # heartbeats, polls and silence

    def heartbeat(self, core_step_age_s: float, longest_step_s: float, *, has_work: bool) -> bool:
        """Note a report of the replica, which makes it suspect if its core is silent for too long.

        Args:
            longest_step_s: its core's longest recent step; zero if unknown.
            has_work: whether it has requests; a core without any may be silent for longer.

        Returns:
            Whether it became suspect, or is suspect no more.
        """
        self.core_step_age_s = core_step_age_s
        self.stall_bound_s = stall_bound_s(longest_step_s)
        is_stalled = self.is_core_overdue and has_work
        return self._set_suspect(is_stalled or core_step_age_s > SUSPECT_STEP_AGE_S)

    def silent(self, now: float, *, may_eject: bool) -> bool:
        """Note that heartbeats stopped, or that a new connection got no answer either. The first silence makes the
        replica suspect; each further one is a failure.

        Args:
            may_eject: as in `failed`.

        Returns:
            Whether it became suspect, or is ejected from now on.
        """
        return self._set_suspect(True) or self.failed(now, may_eject=may_eject)

    def reachable(self) -> bool:
        """Note that the replica's process responded. Returns whether this ended a suspicion."""
        return self._set_suspect(False)

    def synced(self) -> bool:
        """Note that the telemetry stream is complete. Returns whether this ended an ejection or a suspicion."""
        was_ejected = self.succeeded()
        return self._set_suspect(False) or was_ejected

    def telemetry_lost(self) -> None:
        """Note that the telemetry stream ended: nothing is known about the core's last step."""
        self.core_step_age_s = 0.0

    def polled(self, *, is_answering: bool) -> bool:
        """Note the outcome of polls of a foreign replica. Returns whether it differs from the one before."""
        if is_answering == self.is_answering:
            return False
        self.is_answering = is_answering
        if is_answering:
            self.succeeded()
        return True

    def _set_suspect(self, is_suspect: bool) -> bool:
        was_suspect, self._is_suspect = self._is_suspect, is_suspect
        return was_suspect != is_suspect

    # cooldown

    def cool_down(self, now: float, seconds: float, *, until_capacity: bool) -> bool:
        """Put the replica in cooldown for `seconds`, because it said that it is full.

        Args:
            until_capacity: end the cooldown as soon as its telemetry reports capacity, which it does not yet.

        Returns:
            Whether it was not in cooldown before.
        """
        was_in_cooldown = self.is_in_cooldown(now)
        self.cooldown_until = max(self.cooldown_until, now + seconds)
        self._cooldown_ends_with_capacity = until_capacity
        return not was_in_cooldown

    def found_capacity(self) -> bool:
        """Note that its telemetry reports capacity. Returns whether this may have ended a cooldown."""
        if not self._cooldown_ends_with_capacity:
            return False
        self.cooldown_until = 0.0
        self._cooldown_ends_with_capacity = False
        return True

    def is_in_cooldown(self, now: float) -> bool:
        return now < self.cooldown_until

    # how attempts ended

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent: the replica is not ejected, or half-open and no probe is in flight (or
        none of the last `PROBE_S`)."""
        if self._ejected_until is None:
            return True
        return now >= self._ejected_until and (not self._is_probing or now >= self._next_probe)

    def next_change(self, now: float) -> float:
        """Return when `admits` or `is_in_cooldown` changes by the clock alone; infinity if it does not."""
        ends = inf
        if self._ejected_until is not None:
            if now < self._ejected_until:
                ends = self._ejected_until
            elif self._is_probing and now < self._next_probe:
                ends = self._next_probe
        return min(ends, self.cooldown_until) if now < self.cooldown_until else ends

    def dispatched(self, now: float) -> bool:
        """Note that a request is being sent. Returns whether it is the probe of a half-open replica."""
        is_probe = self._ejected_until is not None and now >= self._ejected_until
        if is_probe:
            self._is_probing = True
            self._next_probe = now + PROBE_S
        return is_probe

    def abandoned(self) -> bool:
        """Note a request whose end says nothing about the replica, for example because its client left.

        Returns:
            Whether this released a probe, so that a request may be sent now that was not admitted before.
        """
        was_probing, self._is_probing = self._is_probing, False
        return was_probing

    def began(self) -> bool:
        """Note that an answer has begun, which ends the ejection of a replica that is being probed: a stream may take
        minutes. Until an answer is whole the next failure ejects it again, for longer.

        Returns:
            Whether this ended an ejection.
        """
        if not self._is_probing:
            return False
        self._is_probing = False
        self._is_on_probation = True
        self._ejected_until = None
        return True

    def succeeded(self) -> bool:
        """Note a whole answer. Returns whether this ended an ejection."""
        was_ejected = self._ejected_until is not None
        self.consecutive_failures = 0
        self._ejections = 0
        self._ejected_until = None
        self._is_probing = False
        self._is_on_probation = False
        return was_ejected

    def failed(
        self, now: float, *, may_eject: bool, refused: bool = False, after: int = CONSECUTIVE_FAILURES
    ) -> bool:
        """Note a failure.

        Args:
            may_eject: the result of `may_eject` for the service's replicas.
            refused: no process listens.
            after: how many failures in a row, of any kind, eject if the last one is of this kind.

        Returns:
            Whether this failure began or renewed an ejection.
        """
        self.consecutive_failures += 1
        probing, self._is_probing = self._is_probing, False
        due = probing or self._is_on_probation or refused or self.consecutive_failures >= after
        if not due or not (may_eject or self.is_ejected):
            return False
        if self._ejected_until is not None and now < self._ejected_until:
            return False  # sent before the ejection, or in panic: no news about the replica
        self._ejected_until = now + min(MAX_EJECTION_S, BASE_EJECTION_S * 2**self._ejections)
        self._ejections = min(self._ejections + 1, 10)
        return True


PANIC_SHARE: Final = 0.5
"""Above this share of ejected replicas, failures say more about requests or the network than about replicas, and the
replicas that are left would break down under the load of all. Envoy's panic threshold counts the healthy ones."""


def may_eject(replicas: Sequence[ReplicaHealth]) -> bool:
    """Return whether one more of a service's routable replicas may be ejected: at most half, never the last one."""
    ejected = sum(health.is_ejected for health in replicas)
    return ejected + 1 <= len(replicas) // 2


def panics(replicas: Sequence[ReplicaHealth]) -> bool:
    """Return whether so many of a service's routable replicas are ejected that ejections are ignored."""
    ejected = sum(health.is_ejected for health in replicas)
    return ejected > PANIC_SHARE * len(replicas)

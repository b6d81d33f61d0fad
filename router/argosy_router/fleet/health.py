"""Health: whether a replica should get requests, judged by how the last ones ended.

Owns: one replica's health, how many replicas may be ejected, and when ejections are ignored.
Must not know: requests, telemetry, how a replica is chosen.
Invariants: failures eject at most half of a service's routable replicas and never the last one; when replicas leave so
that more than half of those left are ejected, ejections are ignored (panic); a success ends an ejection. A replica that
says that it is full is put in cooldown, which is no failure: it neither ejects nor counts towards an ejection.

healthy --failures--> ejected --back-off over--> half-open (one probe request) --first event--> healthy
                         ^------------------------------- failure ---------------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

CONSECUTIVE_FAILURES = 3
"""Gateway failures in a row (resets, missed first bytes, malformed answers) before ejection. One refused connection is
enough: no process listens."""
BASE_EJECTION_S = 1.0
"""The first ejection; each further one in a row doubles, up to `MAX_EJECTION_S`."""
MAX_EJECTION_S = 30.0
PANIC_SHARE = 0.5
"""Above this share of ejected replicas, failures say more about requests or the network than about replicas, and the
replicas that are left would break down under the load of all. Envoy's panic threshold counts the healthy ones."""
SUSPECT_STEP_AGE_S = 15.0
"""A core that has not stepped for this long while its HTTP server reports is stuck in a kernel, or dead. Longer than a
long prefill step."""
MIN_STALL_S = 5.0
"""A core that has work and has been silent for less is not stalled, however short its steps are: kernels are compiled,
and machines pause."""
STALL_STEPS = 5.0
"""A core with work may be silent for this multiple of its longest recent step."""


def stall_bound_s(longest_step_s: float) -> float:
    """Return how long a core with work may be silent before its requests move to other replicas.

    Args:
        longest_step_s: its longest recent step; zero if unknown.
    """
    if not longest_step_s:
        return SUSPECT_STEP_AGE_S
    return max(MIN_STALL_S, STALL_STEPS * longest_step_s)


class Health:
    """Health of one replica. Times are a monotonic clock's, passed in."""

    __slots__ = (
        "_cooldown_ends_with_room",
        "_ejected_until",
        "_ejections",
        "_is_on_probation",
        "_is_probing",
        "consecutive_failures",
        "cooldown_until",
        "is_suspect",
    )

    def __init__(self) -> None:
        self.consecutive_failures = 0
        self._ejections = 0
        self._ejected_until: float | None = None
        self._is_probing = False
        self._is_on_probation = False
        """Whether an ejection has ended and no answer has been whole since: the next failure ejects again."""
        self.is_suspect = False
        """Whether the replica is used only if no better one is left."""
        self.cooldown_until = 0.0
        """End of the cooldown, during which the replica is used only if no other is left, because it said that it is
        full. In the past if the replica is not in cooldown."""
        self._cooldown_ends_with_room = False

    @property
    def is_ejected(self) -> bool:
        return self._ejected_until is not None

    @property
    def is_healthy(self) -> bool:
        return self._ejected_until is None and not self.is_suspect

    def condition(self, now: float) -> Literal["well", "suspect", "ejected", "half-open"]:
        """Describe the health for people. Half-open: the next request is a probe, or a probe is under way."""
        if self._ejected_until is None:
            return "suspect" if self.is_suspect else "well"
        return "half-open" if now >= self._ejected_until else "ejected"

    def cool_down(self, now: float, seconds: float, *, until_room: bool) -> bool:
        """Put a replica in cooldown that says that it is full, and wants to be asked again in so many seconds.

        Args:
            until_room: end the cooldown as soon as its telemetry tells of room, which it does not yet.

        Returns:
            Whether it was not in cooldown before.
        """
        was_in_cooldown = self.is_in_cooldown(now)
        self.cooldown_until = max(self.cooldown_until, now + seconds)
        self._cooldown_ends_with_room = until_room
        return not was_in_cooldown

    def found_room(self) -> bool:
        """Note that its telemetry tells of room. Returns whether this may have ended a cooldown."""
        if not self._cooldown_ends_with_room:
            return False
        self.cooldown_until = 0.0
        self._cooldown_ends_with_room = False
        return True

    def is_in_cooldown(self, now: float) -> bool:
        return now < self.cooldown_until

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent: not ejected, or half-open without a probe under way."""
        return self._ejected_until is None or (now >= self._ejected_until and not self._is_probing)

    def next_change(self, now: float) -> float:
        """When `admits` or `is_in_cooldown` changes by the clock alone; infinity if it does not."""
        ends = inf
        if self._ejected_until is not None and now < self._ejected_until:
            ends = self._ejected_until
        return min(ends, self.cooldown_until) if now < self.cooldown_until else ends

    def dispatched(self, now: float) -> bool:
        """Note that a request is being sent. Returns whether it is the probe of a half-open replica."""
        is_probe = self._ejected_until is not None and now >= self._ejected_until
        if is_probe:
            self._is_probing = True
        return is_probe

    def abandoned(self) -> bool:
        """Note a request that ended without telling anything about the replica, for example because its client left.

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
        self,
        now: float,
        *,
        may_eject: bool,
        refused: bool = False,
        after: int = CONSECUTIVE_FAILURES,
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
            return False  # sent before the ejection, or in panic: it tells nothing new
        self._ejected_until = now + min(MAX_EJECTION_S, BASE_EJECTION_S * 2**self._ejections)
        self._ejections = min(self._ejections + 1, 10)
        return True


def may_eject(replicas: Sequence[Health]) -> bool:
    """Return whether one more of a service's routable replicas may be ejected: at most half, never the last one."""
    ejected = sum(health.is_ejected for health in replicas)
    return ejected + 1 <= len(replicas) // 2


def panics(replicas: Sequence[Health]) -> bool:
    """Return whether so many of a service's routable replicas are ejected that ejections are ignored."""
    ejected = sum(health.is_ejected for health in replicas)
    return ejected > PANIC_SHARE * len(replicas)

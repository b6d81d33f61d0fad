"""How many clients may be connected, and who gives way when one more comes.

Owns: the count, and the order of those that are between two requests or have yet to send a request's head. Must not
know: what is said on a connection.
Invariants: a newcomer is turned away only while all others have sent a request that is read or answered; none of those
is ever cut for it. Of those turned away at most `MAX_SURPLUS` are there to hear it.

Descriptors are the scarce good: each request takes two, the client's connection and the replica's, so the default is
half of what the process may open (HAProxy's rule). Like nginx, the router closes kept connections that idle before it
refuses new ones: their clients open another one, as they must when a keep-alive timeout meets their next request.

A connection without a whole head is silent: nobody knows yet whether a key stands behind it. Whoever opens as many as
there are seats would keep all others out, so silent connections give way: those that have had `GRACE_S` first, then
those that idle, then the rest, oldest first each. One address (`AddressGroups`) has at most `silent_per_address` that
have had their time, so that one machine cannot push out another's; behind a proxy that many clients share, it is none
(`--trusted-proxy`).
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Protocol

MAX_SURPLUS = 256
"""Connections that are being told that they are too many; a further one is reset."""
SPARE_DESCRIPTORS = 512
"""For those, for telemetry, the admin port and files."""
MAX_DEFAULT = 16384
"""An event loop is busy with far fewer requests; what idles costs some 3 KB each."""
MIN_DEFAULT = 64
GRACE_S = 1.0
"""Within it a client that means to ask has sent a head, over any network, also where it opens hundreds of connections
at once."""
SHARE_PER_ADDRESS = 8
"""One address has one part of so many of the seats for silent connections, where nothing else is said."""
MIN_PER_ADDRESS = 8
MAX_KNOWN_ADDRESSES = 4096

Network = IPv4Network | IPv6Network


class Seated(Protocol):
    """A connection, as seats know it."""

    @property
    def address(self) -> str:
        """Group of its client's address (`AddressGroups`)."""
        ...

    def give_way(self) -> bool:
        """Closes it, if that harms nobody. Returns whether it did."""
        ...


def open_files_limit() -> int:
    """Descriptors that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * MAX_DEFAULT + SPARE_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def default_connections(open_files: int) -> int:
    """How many clients may be connected where nobody says it."""
    return max(MIN_DEFAULT, min(MAX_DEFAULT, (open_files - SPARE_DESCRIPTORS) // 2))


class AddressGroups:
    """Which addresses count as one client's. `trusted` are the networks of proxies, which many clients share."""

    def __init__(self, trusted: Sequence[Network] = ()) -> None:
        self._trusted = trusted
        self.of = lru_cache(MAX_KNOWN_ADDRESSES)(self._of)
        """The group of a peer's address, empty for none: an IPv4 address, or the /64 network of an IPv6 one, which is
        what one machine gets."""

    def _of(self, host: str) -> str:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return ""  # not a network's
        if address.version == 6:
            address = address.ipv4_mapped or address
        if any(address.version == network.version and address in network for network in self._trusted):
            return ""
        if address.version == 4:
            return str(address)
        return socket.inet_ntop(socket.AF_INET6, address.packed[:8] + bytes(8)) + "/64"


class Seats:
    """The places of one server. Times are those of one monotonic clock."""

    def __init__(self, limit: int, silent_per_address: int = 0) -> None:
        """Zero for `silent_per_address` makes it a share of `limit`."""
        self._limit = limit
        self._silent_per_address = silent_per_address or max(MIN_PER_ADDRESS, limit // SHARE_PER_ADDRESS)
        self._taken = 0
        self._surplus = 0
        self.refused = 0
        """Connections without a seat so far."""
        self.idle: dict[Seated, None] = {}
        """Kept connections between two requests; the one that has been for longest comes first."""
        self._silent: dict[Seated, float] = {}
        """Connections without a whole head, since when; the oldest comes first."""
        self._by_address: dict[str, dict[Seated, None]] = {}
        """Of them, those of each address."""

    def take(self, now: float) -> bool:
        """A connection has come; `leave` must follow. Returns whether there is a seat for it."""
        if self._taken < self._limit or self._one_gives_way(now):
            self._taken += 1
            return True
        self._surplus += 1
        self.refused += 1
        return False

    @property
    def is_crowded(self) -> bool:
        """Whether too many stand to be told so."""
        return self._surplus > MAX_SURPLUS

    def fell_silent(self, connection: Seated, now: float) -> None:
        """A seated connection has to send a head."""
        self._silent[connection] = now
        address = connection.address
        if not address:
            return
        same = self._by_address.setdefault(address, {})
        same[connection] = None
        while len(same) > self._silent_per_address:
            oldest = next(iter(same))
            if now - self._silent[oldest] < GRACE_S:
                return
            self._give_way(oldest)

    def spoke(self, connection: Seated) -> None:
        """A silent connection has sent its head, or ends."""
        if self._silent.pop(connection, None) is None:
            return
        address = connection.address
        same = self._by_address.get(address)
        if same is not None and same.pop(connection, connection) is None and not same:
            del self._by_address[address]

    def leave(self, connection: Seated, *, is_seated: bool) -> None:
        """The connection has ended."""
        self.idle.pop(connection, None)
        self.spoke(connection)
        if is_seated:
            self._taken -= 1
        else:
            self._surplus -= 1

    def _one_gives_way(self, now: float) -> bool:
        return self._a_silent_one(now - GRACE_S) or self._an_idle_one() or self._a_silent_one(now)

    def _a_silent_one(self, since: float) -> bool:
        """The oldest one, if it has been silent for so long."""
        while self._silent:
            oldest = next(iter(self._silent))
            if self._silent[oldest] > since:
                return False
            if self._give_way(oldest):
                return True
        return False

    def _an_idle_one(self) -> bool:
        while self.idle:
            longest = next(iter(self.idle))
            del self.idle[longest]
            if longest.give_way():
                return True
        return False

    def _give_way(self, connection: Seated) -> bool:
        self.spoke(connection)
        return connection.give_way()

"""What clients may hold of a server: how many may be connected, and which connection closes to admit a new one
(`ConnectionLimit`); the memory of request bodies, and an account's part of it (`BodyMemory`).

Must not know: what is said on a connection.
Invariants: a new connection is refused only while all others have a request that is being read or answered. None of
those is closed for it, unless its body is still being received and its account has more than its share of such
connections. At most `MAX_SURPLUS` connections over the limit are kept open long enough to receive a 503.

File descriptors are the scarce resource: each request takes two, the client's connection and the replica's, so the
default is half of what the process may open (HAProxy's rule). Like nginx, the router closes idle keep-alive connections
before it refuses new ones: their clients open another one, as they must when a keep-alive timeout races with their
next request.

On a silent connection the client has shown no key yet. An attacker who opens as many as the limit would keep everybody
else out, so silent connections are closed to admit others: first those silent for `GRACE_S`, then idle connections,
then the remaining silent ones, oldest first each. One address (`AddressGroups`) may have at most `silent_per_address`
connections that are silent for longer than `GRACE_S`, so that one machine cannot displace another's. Addresses of
proxies, which many clients share (`--trusted-proxy`), are exempt.

A client with a key can send bodies so slowly that each takes a quarter of an hour. At the limit, therefore, of the
account with most connections that receive a body the oldest is closed, if these are more than 1/8 of the limit.
"""

# Not compiled: a few additions or dictionary operations for each connection and each body.

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Protocol

from argosy_protocol.errors import Unavailable

MAX_SURPLUS = 256
"""Connections over the limit that are open to be refused with a response; a further one is reset."""
SPARE_DESCRIPTORS = 512
"""Reserved for surplus connections, telemetry, the admin port and files."""
MAX_DEFAULT = 16384
"""Far fewer requests saturate an event loop; an idle connection costs some 3 KB."""
MIN_DEFAULT = 64
GRACE_S = 1.0
"""An honest client sends a request head within this time, over any network, even when it opens hundreds of connections
at once."""
SHARE_PER_ADDRESS = 8
"""By default one address may have 1/8 of the connection limit as silent connections."""
MIN_PER_ADDRESS = 8
SHARE_PER_ACCOUNT = 8
"""At the limit one account may have 1/8 of it as connections that receive a request's body."""
MIN_PER_ACCOUNT = 8
MAX_KNOWN_ADDRESSES = 4096

Network = IPv4Network | IPv6Network


class LimitedConnection(Protocol):
    """What the connection limit needs of a connection."""

    @property
    def address(self) -> str:
        """Group of its client's address (`AddressGroups`)."""
        ...

    def displace(self) -> bool:
        """Close the connection to admit another, if that interrupts no whole request. Returns whether it was closed."""
        ...


def open_files_limit() -> int:
    """File descriptors that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * MAX_DEFAULT + SPARE_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def default_connections(open_files: int) -> int:
    """Default connection limit for a process that may open `open_files` descriptors."""
    return max(MIN_DEFAULT, min(MAX_DEFAULT, (open_files - SPARE_DESCRIPTORS) // 2))


class AddressGroups:
    """Groups addresses that count as one client. `trusted` are the networks of proxies, which many clients share."""

    def __init__(self, trusted: Sequence[Network] = ()) -> None:
        self._trusted = trusted
        self.of = lru_cache(MAX_KNOWN_ADDRESSES)(self._of)
        """The group of a peer's address: the address itself for IPv4, its /64 network for IPv6, as one machine gets a
        /64; empty for a trusted proxy or a peer without an IP address."""

    def _of(self, host: str) -> str:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return ""  # not an IP address, such as a Unix socket's
        if address.version == 6:
            address = address.ipv4_mapped or address
        if any(address.version == network.version and address in network for network in self._trusted):
            return ""
        if address.version == 4:
            return str(address)
        return socket.inet_ntop(socket.AF_INET6, address.packed[:8] + bytes(8)) + "/64"


class ConnectionLimit:
    """The connection limit of one server, and the connections that close to admit others. All times are of one
    monotonic clock."""

    def __init__(self, limit: int, silent_per_address: int = 0) -> None:
        """`silent_per_address` of zero stands for a share of `limit`."""
        self._limit = limit
        self._silent_per_address = silent_per_address or max(MIN_PER_ADDRESS, limit // SHARE_PER_ADDRESS)
        self._receiving_per_account = max(MIN_PER_ACCOUNT, limit // SHARE_PER_ACCOUNT)
        self._admitted = 0
        self._surplus = 0
        self.refused = 0
        """Connections refused so far."""
        self.idle: dict[LimitedConnection, None] = {}
        """Keep-alive connections between two requests, the longest idle first."""
        self._silent: dict[LimitedConnection, float] = {}
        """Silent connection -> since when, oldest first."""
        self._by_address: dict[str, dict[LimitedConnection, None]] = {}
        """Address group -> its silent connections, oldest first."""
        self._receiving: dict[LimitedConnection, object] = {}
        """Connection that receives a body -> the account that sends it."""
        self._by_account: dict[object, dict[LimitedConnection, float]] = {}
        """Account -> its connections that receive a body and since when, oldest first."""

    def admit(self, now: float) -> bool:
        """Count a new connection, which must `release` when it ends. Returns whether it is admitted."""
        if self._admitted < self._limit or self._displace_one(now):
            self._admitted += 1
            return True
        self._surplus += 1
        self.refused += 1
        return False

    @property
    def free(self) -> int:
        """Connections that may still be admitted without closing another."""
        return max(0, self._limit - self._admitted)

    @property
    def is_surplus_full(self) -> bool:
        """Whether more than `MAX_SURPLUS` connections over the limit are open."""
        return self._surplus > MAX_SURPLUS

    def add_silent(self, connection: LimitedConnection, now: float) -> None:
        """Add an admitted connection that still has to send a request head."""
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
            self._displace(oldest)

    def remove_silent(self, connection: LimitedConnection) -> None:
        """Remove a silent connection because its head has arrived, or because it ends."""
        if self._silent.pop(connection, None) is None:
            return
        address = connection.address
        same = self._by_address.get(address)
        if same is not None and same.pop(connection, connection) is None and not same:
            del self._by_address[address]

    def add_receiving(self, connection: LimitedConnection, account: object, now: float) -> None:
        """Add an admitted connection on which an account begins to send a request's body."""
        self._receiving[connection] = account
        self._by_account.setdefault(account, {})[connection] = now

    def remove_receiving(self, connection: LimitedConnection) -> None:
        """Remove a connection because its request is whole or refused, or because it ends."""
        if connection not in self._receiving:
            return
        account = self._receiving.pop(connection)
        same = self._by_account[account]
        del same[connection]
        if not same:
            del self._by_account[account]

    def release(self, connection: LimitedConnection, *, is_admitted: bool) -> None:
        """Stop counting a connection that has ended."""
        self.idle.pop(connection, None)
        self.remove_silent(connection)
        self.remove_receiving(connection)
        if is_admitted:
            self._admitted -= 1
        else:
            self._surplus -= 1

    def _displace_one(self, now: float) -> bool:
        since = now - GRACE_S
        return (
            self._displace_silent(since)
            or self._displace_receiving(since)
            or self._displace_idle()
            or self._displace_silent(now)
            or self._displace_receiving(now)
        )

    def _displace_silent(self, since: float) -> bool:
        """Close the oldest silent connection if it has been silent since `since` or before."""
        while self._silent:
            oldest = next(iter(self._silent))
            if self._silent[oldest] > since:
                return False
            if self._displace(oldest):
                return True
        return False

    def _displace_receiving(self, since: float) -> bool:
        """Close the oldest connection that receives a body, of the account with most of them, if these are more than
        the account's share and it began at `since` or before."""
        most = max(self._by_account.values(), key=len, default={})
        if len(most) <= self._receiving_per_account:
            return False
        oldest = next(iter(most))
        if most[oldest] > since:
            return False
        self.remove_receiving(oldest)
        return oldest.displace()

    def _displace_idle(self) -> bool:
        while self.idle:
            longest = next(iter(self.idle))
            del self.idle[longest]
            if longest.displace():
                return True
        return False

    def _displace(self, connection: LimitedConnection) -> bool:
        self.remove_silent(connection)
        return connection.displace()


BODY_SHARE_OF_FREE = 3


class BodyMemory:
    """Counts the request body bytes that all connections of a server hold, up to a limit.

    Stored conversations that requests continue count like bodies, and so do the bodies of requests that outlive their
    connections, and what clients have not read of their responses.

    An account may hold three times as much as is free (Choudhury and Hahne, "Dynamic queue length thresholds"): alone
    at most three quarters of the limit, so that others always find room, and less the more others hold. A single body
    is not bound by it, because the limit may be small.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        """Bytes reserved and not released."""
        self._of_account: dict[object, int] = {}
        """Those of each account."""

    def reserve(self, size: int, account: object, begun: int) -> None:
        """Reserve `size` bytes.

        Args:
            account: whose share it counts for; None for a client that cannot be told from others.
            begun: bytes of the same body that are reserved already.

        Raises:
            Unavailable: the limit or the account's share of it would be exceeded; nothing was reserved.
        """
        held = self.held + size
        if held > self._limit:
            raise Unavailable(
                "the limit of memory for request bodies (--max-inflight-bytes) is reached; retry later",
                retry_after_s=1.0,
            )
        if account is not None:
            own = self._of_account.get(account, 0)
            if own > begun and own + size > BODY_SHARE_OF_FREE * (self._limit - held):
                raise Unavailable(
                    "other requests of this key hold its share of the memory for request bodies "
                    "(--max-inflight-bytes); retry later",
                    retry_after_s=1.0,
                )
            self._of_account[account] = own + size
        self.held = held

    def release(self, size: int, account: object) -> None:
        self.held -= size
        if account is not None and size:
            own = self._of_account[account] - size
            if own:
                self._of_account[account] = own
            else:
                del self._of_account[account]


class BodyReservation:
    """Memory of one request beside its body as received, such as the conversation that it continues. Whoever has it
    releases it once."""

    def __init__(self, memory: BodyMemory, account: object, body_bytes: int) -> None:
        """Reserve nothing yet.

        Args:
            account: as for `BodyMemory.reserve`.
            body_bytes: bytes of the request's body that are reserved already.
        """
        self._memory = memory
        self._account = account
        self._body_bytes = body_bytes
        self.size = 0
        """Bytes reserved."""

    def grow(self, size: int) -> None:
        """Reserve `size` more bytes.

        Raises:
            Unavailable: see `BodyMemory.reserve`.
        """
        self._memory.reserve(size, self._account, self._body_bytes + self.size)
        self.size += size

    def shrink(self, size: int) -> None:
        """Release what is beyond `size` bytes, if anything is."""
        if size < self.size:
            self._memory.release(self.size - size, self._account)
            self.size = size

    def release(self) -> None:
        """Release everything; nothing if that has happened."""
        size, self.size = self.size, 0
        self._memory.release(size, self._account)

"""How much work a replica has: what it reports, corrected by what we sent since.

Owns: the in-flight account of one replica. Must not know: how the figures are weighed.
Invariant: every charge is discharged exactly once, whatever becomes of its request (`Charge.release` is the only way
out and counts only once).

A report is up to a heartbeat old and sums all routers' work. Two decisions a millisecond apart must not collide, so
own dispatches count at once: estimate = max(own, reported + own change since the report).
"""

from __future__ import annotations


class LoadAccount:
    """Queued prompt tokens and requests of one replica."""

    __slots__ = (
        "_request_change",
        "_token_change",
        "decode_step_s",
        "inflight",
        "inflight_tokens",
        "kv_usage",
        "max_num_seqs",
        "prefill_tokens_per_s",
        "reported_requests",
        "reported_tokens",
    )

    def __init__(self) -> None:
        self.inflight = 0
        """Own requests without an end yet."""
        self.inflight_tokens = 0
        """Uncached prompt tokens of own requests without a first token yet."""
        self.reported_requests = 0
        self.reported_tokens = 0
        self.kv_usage = 0.0
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self.max_num_seqs = 0
        self._token_change = 0
        self._request_change = 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed before a new request's own."""
        return max(self.inflight_tokens, self.reported_tokens + self._token_change)

    @property
    def requests(self) -> int:
        """Requests running or waiting."""
        return max(self.inflight, self.reported_requests + self._request_change)

    def charge(self, tokens: int) -> Charge:
        """Accounts for a request about to be sent."""
        self.inflight += 1
        self._request_change += 1
        self._change_tokens(tokens)
        return Charge(self, tokens)

    def report(self, *, requests: int, tokens: int) -> None:
        """The replica's own figures, which include what we charged before."""
        self.reported_requests = requests
        self.reported_tokens = tokens
        self._token_change = 0
        self._request_change = 0

    def forget(self) -> None:
        """The replica's figures are void (stream lost, restarted): only our own account counts."""
        self.report(requests=0, tokens=0)
        self.kv_usage = 0.0

    def _change_tokens(self, tokens: int) -> None:
        self.inflight_tokens += tokens
        self._token_change += tokens

    def _end(self) -> None:
        self.inflight -= 1
        self._request_change -= 1


class Charge:
    """One dispatched request on one replica's account."""

    __slots__ = ("_account", "_is_open", "_tokens")

    def __init__(self, account: LoadAccount, tokens: int) -> None:
        self._account = account
        self._tokens = tokens
        self._is_open = True

    def first_token(self) -> None:
        """The prompt is computed: its tokens no longer queue."""
        if self._tokens:
            self._account._change_tokens(-self._tokens)
            self._tokens = 0

    def release(self) -> None:
        """The request is over, however it ended."""
        if self._is_open:
            self._is_open = False
            self.first_token()
            self._account._end()

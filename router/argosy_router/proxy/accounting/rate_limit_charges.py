"""Charging of rate limits: reserves a request's tokens before it is sent, and settles the reservation at its end.

Owns: when limits are charged (a request at its head, before its body is read; its tokens once they are estimated), and
how many tokens an outcome counts for. Must not know: exchanges, token buckets.
Invariant: a reservation is closed once, when its request ends.
"""

from __future__ import annotations

from argosy_protocol.openai import MAX_TOKENS
from argosy_router.auth.accounts import Account
from argosy_router.metrics.definitions import RATE_LIMITED
from argosy_router.metrics.series import Series
from argosy_router.proxy.accounting.outcome import CLIENT_GONE, RequestOutcome
from argosy_router.ratelimit.key_limits import RateLimited


class RateLimitCharges:
    """Reserves and settles tokens for the keys of one router."""

    def __init__(self) -> None:
        self._limited = RATE_LIMITED.counter()

    def series(self) -> tuple[Series, ...]:
        """Return the metrics of refusals."""
        return (self._limited,)

    def charge_request(self, account: Account, now: float) -> bool:
        """Charge a request to its key's limits at its head, if the key has any; return whether it has.

        Raises:
            RateLimited: the key's rate is reached; nothing was charged.
        """
        if not account.is_limited:
            return False
        try:
            account.charge_request(now)
        except RateLimited:
            self._limited.add((account.name,))
            raise
        return True

    def reserve(self, outcome: RequestOutcome) -> None:
        """Reserve a request's estimated tokens, if its key has limits.

        Raises:
            RateLimited: one of the limits is reached; nothing was taken.
            BadRequest: the request can never be within the limits.
        """
        call = outcome.call
        account = call.account
        if not account.is_limited:
            return
        try:
            outcome.reservation = account.reserve(
                call.estimate.total, outcome.started, call.estimate.sequences, is_charged=call.is_charged
            )
        except RateLimited:
            self._limited.add((account.name,))
            raise

    def settle(self, outcome: RequestOutcome, now: float) -> None:
        """Charge the tokens that a request has used, or release the reservation if it was never sent."""
        reservation = outcome.reservation
        if reservation is None:
            return
        if outcome.attempts:
            reservation.settle(_tokens_used(outcome, now))
        else:
            reservation.cancel()


def _tokens_used(outcome: RequestOutcome, now: float) -> int:
    """Return the tokens charged for a request that was sent: its usage; an estimate of what was computed if the answer
    reported none; zero for an error, unless the replica computed until the request's time had passed."""
    record, choice, estimate = outcome.record, outcome.choice, outcome.call.estimate
    if record is not None and record.completion_tokens is not None:
        return estimate.used(record.prompt_tokens, record.completion_tokens)
    if choice is None or (outcome.status not in (200, CLIENT_GONE) and not outcome.is_cut_short):
        return 0
    if outcome.is_cut_short and outcome.call.is_stream:
        return estimate.prompt_tokens  # it has generated nothing: a stream's first token would have been seen
    replica = choice.replica
    max_tokens = replica.hello.max_model_len if replica.hello is not None else MAX_TOKENS
    generating_s = now - outcome.sent_at - choice.predicted_ttft_s
    return estimate.generated_in(generating_s, replica.load.decode_step_s, max_tokens)

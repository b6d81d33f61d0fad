"""Evidence that a share is too large, which may be looked at as often as one likes.

Must not know canaries, bounds of a resource or clocks. A share is of independent attempts: `count` of `total`.

    evidence = log( average likelihood over all shares / largest likelihood that the bound allows )

The average is over Beta(1/2, 1/2) (Krichevsky and Trofimov 1981), so it follows whatever share is true; the divisor is
the best case for who is judged. While the bound holds, exp(evidence) is at most a nonnegative martingale that starts
at 1, so by Ville's inequality it ever reaches 1/a with a probability of at most a, however many looks there are and
whenever one stops (Wasserman, Ramdas and Balakrishnan, "Universal inference", PNAS 2020; Howard and Ramdas,
"Time-uniform Chernoff bounds via nonnegative supermartingales", 2020). Wald's test is the case of one known
alternative.
"""

from __future__ import annotations

from math import inf, lgamma, log, pi, sqrt

from msgspec import Struct


class Share(Struct, frozen=True):
    """`count` of `total` attempts."""

    count: int = 0
    total: int = 0

    @property
    def rate(self) -> float:
        return self.count / self.total if self.total else 0.0


def evidence_above(bound: float, share: Share) -> float:
    """Evidence that the share is larger than `bound`; negative if the counts speak for neither."""
    if share.rate <= bound:
        return -inf
    return _average(share) - _likelihood(min(1.0, bound), share)


def evidence_of_ratio_above(ratio: float, share: Share, other: Share) -> float:
    """Evidence that the share is larger than `ratio` (above 0) times the other one. Neither is known, and how many
    attempts each has may depend on what came before."""
    if not share.total or not other.total or share.rate <= ratio * other.rate:
        return -inf
    shared = _other_at_bound(ratio, share, other)
    best = _likelihood(min(1.0, ratio * shared), share) + _likelihood(shared, other)
    return _average(share) + _average(other) - best


def _other_at_bound(ratio: float, share: Share, other: Share) -> float:
    """The other share that makes both counts likeliest if the first is `ratio` times it: the smaller root of the
    likelihood's derivative, a quadratic."""
    counts, total = share.count + other.count, share.total + other.total
    a = ratio * total
    b = ratio * (counts + share.total - share.count) + counts + other.total - other.count
    root = sqrt(max(0.0, b * b - 4.0 * a * counts))
    return min(1.0, 1.0 / ratio, 2.0 * counts / (b + root))


def _average(share: Share) -> float:
    """Log of the likelihood's average over Beta(1/2, 1/2)."""
    count, rest = share.count, share.total - share.count
    return lgamma(count + 0.5) + lgamma(rest + 0.5) - lgamma(share.total + 1.0) - log(pi)


def _likelihood(rate: float, share: Share) -> float:
    """Log of the likelihood of the counts in their order."""
    return _term(share.count, rate) + _term(share.total - share.count, 1.0 - rate)


def _term(count: int, rate: float) -> float:
    if not count:
        return 0.0
    return count * log(rate) if rate > 0.0 else -inf

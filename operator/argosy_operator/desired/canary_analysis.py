"""Judges a canary by its figures: a pure function of `spec.rollout.canary.analysis` and of what routers measured.

Must not know how steps follow each other, nor clocks.

    error rate              failed attempts / attempts, of the canary; as a ratio: divided by the stable side's
    client error rate       attempts answered with 4xx / attempts, divided by the stable side's
    TTFT, ITL p90 ratio     canary's / stable side's
    cached share ratio      canary's cached / prompt tokens, divided by the stable side's
    hit ratio               canary's cached tokens / those that the routers expected to be cached

A canary fails by evidence only, and passes by the figures of the last window; with figures that are out of bounds but
may be chance it waits. The evidence is of independent attempts, whose shares are compared: failed ones, those that took
longer than nine of ten of the stable side's do (times the bound), those of whose prompts one token, drawn at random,
was not cached. It is taken twice, of all attempts since the service is divided so and of the last window, which finds
what changes late:

    evidence = log( average likelihood over all shares / largest likelihood that the bound allows )

The average is over Beta(1/2, 1/2) (Krichevsky and Trofimov 1981), so it follows whatever share is true; the divisor is
the best case for who is judged. While the bound holds, exp(evidence) is at most a nonnegative martingale that starts at
1, so by Ville's inequality it ever reaches 1/a with a probability of at most a, however many looks there are and
whenever one stops (Wasserman, Ramdas and Balakrishnan, "Universal inference", PNAS 2020; Howard and Ramdas,
"Time-uniform Chernoff bounds via nonnegative supermartingales", 2020). Wald's test is the case of one known
alternative.

Invariants: a canary whose figures are within all bounds fails with a probability of at most FALSE_ALARM_RATE per
rollout, over all steps, bounds and looks; no data is no success: with fewer attempts or streamed answers than
minRequests, or without a router's report, the verdict is to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, inf, lgamma, log, pi, sqrt
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from argosy_operator.observation import QUANTILE, Figures, SplitFigures, bucket_at, bucket_of
from argosy_protocol.reports import SIDE_BOUNDS_S, WINDOW_SLICES
from argosy_resource.rollout import CanaryAnalysis


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


FALSE_ALARM_RATE: Final = 0.01
"""Probability, at most, that a rollout whose figures are within their bounds fails."""
_HORIZONS: Final = 2
"""All attempts, and those of the last window: each has half of the probability."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]


class Baseline(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stable side, as the canary is compared with it: now, or at an earlier step if it gets too few requests."""

    ttft_p90_s: Annotated[float, Meta(ge=0)] | None = None
    itl_p90_s: Annotated[float, Meta(ge=0)] | None = None
    cached_share: Annotated[float, Meta(ge=0)] | None = None
    attempts: _Count = 0
    failures: _Count = 0
    client_errors: _Count = 0
    streams: _Count = 0
    slow_streams: _Count = 0
    """Those with a time to first token above the bucket of its 90th percentile."""
    itl_answers: _Count = 0
    slow_itl_answers: _Count = 0
    sampled: _Count = 0
    sampled_cached: _Count = 0


class Look(Struct, frozen=True, kw_only=True):
    """What a look at the figures is one of."""

    weight: int = 0
    """The canary's, in per cent. At 100 the stable side gets no requests."""
    steps: int = 1
    elapsed_s: float | None = None
    """Seconds for which the service has been divided by this weight; None if not known."""


class Verdict(Struct, frozen=True):
    """What the figures say."""

    kind: Literal["passed", "waiting", "failed"]
    message: str = ""
    """The figure that failed, or what the analysis waits for."""


class _Comparison(Struct, frozen=True):
    """One bound, and the figures that it is of."""

    words: str
    is_within: bool = True
    evidence: float = -inf
    """That it is not within."""
    lacks: str = ""
    """Which data is missing; empty if none is."""
    is_rate_ratio: bool = False
    is_of_caches: bool = False


def baseline_of(analysis: CanaryAnalysis, stable: Figures, before: Baseline) -> Baseline:
    """The stable side's figures as far as there are enough of them; those of `before` where there are not."""
    least, now = analysis.min_requests, _as_baseline(stable)
    has_attempts, has_streams = stable.attempts >= least, stable.streams >= least
    has_itl = now.itl_answers >= least
    attempts = now if has_attempts else before
    streams = now if has_streams else before
    answers = now if has_itl else before
    shares = now if has_attempts and now.cached_share is not None else before
    kept = (
        (attempts, ("attempts", "failures", "client_errors")),
        (streams, ("ttft_p90_s", "streams", "slow_streams")),
        (answers, ("itl_p90_s", "itl_answers", "slow_itl_answers")),
        (shares, ("cached_share", "sampled", "sampled_cached")),
    )
    return Baseline(**{name: getattr(side, name) for side, names in kept for name in names})


def missing_baseline(analysis: CanaryAnalysis, baseline: Baseline) -> str:
    """Which of the stable side's figures the bounds need and `baseline` lacks; empty if none."""
    if analysis.max_ttft_p90_ratio is not None and baseline.ttft_p90_s is None:
        return "too few streamed answers of the stable side to compare with"
    if analysis.max_itl_p90_ratio is not None and baseline.itl_p90_s is None:
        return "too few streamed answers with their usage of the stable side to compare with"
    if analysis.min_cached_share_ratio is not None and baseline.cached_share is None:
        return "too few requests of the stable side to compare cached tokens with"
    ratios = (analysis.max_error_rate_ratio, analysis.max_client_error_rate_ratio)
    if any(each is not None for each in ratios) and baseline.attempts < analysis.min_requests:
        return "too few requests of the stable side to compare with"
    return ""


def judge(analysis: CanaryAnalysis, figures: SplitFigures, before: Baseline, look: Look) -> Verdict:
    """Judge the canary; `before` replaces figures of a stable side that has too few requests now."""
    proofs = list(_proofs(analysis, figures, before, look))
    if proofs:
        return Verdict("failed", proofs[0])
    least, canary = analysis.min_requests, figures.canary
    if canary.attempts < least:
        return Verdict("waiting", f"{canary.attempts} of {least} requests within {analysis.window_seconds} s")
    for each in _compare(
        analysis, canary, baseline_of(analysis, figures.stable, before), figures.is_detailed
    ):
        if each.lacks:
            return Verdict("waiting", each.lacks)
        # Few failures of an earlier step may be too few by chance, and do not change any more.
        is_unclear = look.weight == 100 and each.is_rate_ratio and each.evidence <= 0
        if not (each.is_within or is_unclear):
            return Verdict("waiting", f"{each.words}; that may be chance, and is decided with more requests")
    if not figures.is_complete:
        return Verdict("waiting", "a router has not reported the figures of this step yet")
    return Verdict("passed")


def _proofs(analysis: CanaryAnalysis, figures: SplitFigures, before: Baseline, look: Look) -> Iterator[str]:
    """The bounds that the figures prove to be exceeded.

    Each bound of each step has its part of FALSE_ALARM_RATE (Bonferroni). A window that begins later is a further
    test: the k-th has the part 1 / (k (k + 1)) of its horizon's, which add up to 1.
    """
    stable = before if look.weight == 100 else _as_baseline(figures.stable_total)
    compared = list(_compare(analysis, figures.canary_total, stable, True))
    needed = log(look.steps * len(compared) * _HORIZONS / FALSE_ALARM_RATE)
    for each in compared:
        if each.evidence >= needed and not each.is_of_caches:
            yield each.words
    if look.elapsed_s is None or not figures.is_detailed:
        return
    window_s = analysis.window_seconds
    begun = 1 + ceil(WINDOW_SLICES * figures.routers * look.elapsed_s / window_s)
    needed += log(begun * (begun + 1))
    stable = before if look.weight == 100 else _as_baseline(figures.stable)
    for each in _compare(analysis, figures.canary, stable, True):
        # A canary's caches are empty at first, which is no fault of its build.
        if each.evidence >= needed and not (each.is_of_caches and look.elapsed_s < 2 * window_s):
            yield each.words


def _as_baseline(stable: Figures) -> Baseline:
    return Baseline(
        ttft_p90_s=stable.ttft_p90_s,
        itl_p90_s=stable.itl_p90_s,
        cached_share=stable.cached_share,
        attempts=stable.attempts,
        failures=stable.failures,
        client_errors=stable.client_errors,
        streams=sum(stable.ttft),
        slow_streams=_num_slow(stable.ttft),
        itl_answers=sum(stable.itl),
        slow_itl_answers=_num_slow(stable.itl),
        sampled=stable.sampled,
        sampled_cached=stable.sampled_cached,
    )


def _num_slow(counts: Sequence[int]) -> int:
    return sum(counts[bucket_of(counts, QUANTILE) + 1 :]) if any(counts) else 0


def _compare(
    analysis: CanaryAnalysis, canary: Figures, stable: Baseline, is_detailed: bool
) -> Iterator[_Comparison]:
    """Each bound. Without `is_detailed` some router does not count all that they are of."""
    if analysis.max_error_rate is not None:
        yield _error_rate(analysis.max_error_rate, canary)
    undetailed = "" if is_detailed else "a router of an earlier release does not report all figures"
    least = analysis.min_requests
    few = "" if stable.attempts >= least else "too few requests of the stable side to compare with"
    if (ratio := analysis.max_error_rate_ratio) is not None:
        shares = _share(canary.failures, canary.attempts), _share(stable.failures, stable.attempts)
        yield _rate_ratio("error rate", ratio, *shares, lacks=few)
    if (ratio := analysis.max_client_error_rate_ratio) is not None:
        shares = _share(canary.client_errors, canary.attempts), _share(stable.client_errors, stable.attempts)
        yield _rate_ratio("client error rate (4xx)", ratio, *shares, lacks=undetailed or few)
    if (ratio := analysis.max_ttft_p90_ratio) is not None:
        slow = _share(stable.slow_streams, stable.streams)
        times = canary.ttft_p90_s, stable.ttft_p90_s
        lacks = f"{canary.streams} of {least} streamed answers" if canary.streams < least else ""
        yield _latency_ratio("TTFT", ratio, canary.ttft, times, slow, lacks=lacks)
    if (ratio := analysis.max_itl_p90_ratio) is not None:
        slow, answers = _share(stable.slow_itl_answers, stable.itl_answers), sum(canary.itl)
        times = canary.itl_p90_s, stable.itl_p90_s
        lacks = f"{answers} of {least} streamed answers with their usage" if answers < least else ""
        yield _latency_ratio("ITL", ratio, canary.itl, times, slow, lacks=undetailed or lacks)
    if (ratio := analysis.min_cached_share_ratio) is not None:
        yield _cached_share(ratio, canary, stable)
    if (ratio := analysis.min_hit_ratio) is not None:
        yield _hit_ratio(ratio, canary)


def _error_rate(most: float, canary: Figures) -> _Comparison:
    share = _share(canary.failures, canary.attempts)
    counts = f"{canary.failures} of {canary.attempts} requests failed"
    return _Comparison(
        f"error rate {_percent(share.rate)}, at most {_percent(most)}: {counts}",
        is_within=share.rate <= most,
        evidence=evidence_above(most, share),
    )


def _rate_ratio(name: str, most: float, canary: Share, stable: Share, *, lacks: str) -> _Comparison:
    counts = f"{canary.count} of {canary.total} requests"
    rates = f"{name} {_percent(canary.rate)}, the stable side's {_percent(stable.rate)}"
    # One more than the bound allows is no news where both have next to none.
    without_one = _share(max(0, canary.count - 1), canary.total)
    return _Comparison(
        f"{rates}: at most {most:g} times as much: {counts}",
        is_within=without_one.rate <= most * stable.rate,
        evidence=evidence_of_ratio_above(most, canary, stable),
        lacks=lacks,
        is_rate_ratio=True,
    )


def _latency_ratio(
    name: str,
    most: float,
    canary: Sequence[int],
    p90s: tuple[float | None, float | None],
    stable_slow: Share,
    *,
    lacks: str,
) -> _Comparison:
    """Compare the share of the canary's times above `most` times a bucket's bound with that of the stable side's above
    the bound itself. The bucket is that of the stable side's 90th percentile, which is known afterwards only: hence the
    logarithm of how many there are."""
    ours, theirs = p90s
    if ours is None or theirs is None:
        return _Comparison("", lacks=lacks or "too few streamed answers of the stable side to compare with")
    evidence = -inf
    bucket = bucket_at(theirs)
    if canary and bucket < len(SIDE_BOUNDS_S):
        slow = _share(sum(canary[bucket_at(most * SIDE_BOUNDS_S[bucket]) + 1 :]), sum(canary))
        evidence = evidence_of_ratio_above(1.0, slow, stable_slow) - log(len(SIDE_BOUNDS_S))
    times = f"{name} p90 {ours:.3g} s, the stable side's {theirs:.3g} s"
    return _Comparison(
        f"{times}: at most {most:g} times as long",
        is_within=ours <= most * theirs,
        evidence=evidence,
        lacks=lacks,
    )


def _cached_share(least: float, canary: Figures, stable: Baseline) -> _Comparison:
    share, theirs = canary.cached_share, stable.cached_share
    if share is None:
        return _Comparison("", lacks="no answer of the canary reported its usage", is_of_caches=True)
    if theirs is None:
        lacks = "too few requests of the stable side to compare cached tokens with"
        return _Comparison("", lacks=lacks, is_of_caches=True)
    shares = f"cached share {_percent(share)}, the stable side's {_percent(theirs)}"
    ours = _share(canary.sampled_cached, canary.sampled)
    return _Comparison(
        f"{shares}: at least {least:g} times as much",
        is_within=share >= least * theirs,
        # The stable side's share is more than 1 / least times the canary's.
        evidence=evidence_of_ratio_above(1 / least, _share(stable.sampled_cached, stable.sampled), ours),
        is_of_caches=True,
    )


def _hit_ratio(least: float, canary: Figures) -> _Comparison:
    if not canary.prompt_tokens:
        return _Comparison("", lacks="no answer of the canary reported its usage", is_of_caches=True)
    found = f"{canary.cached_tokens} of {canary.predicted_tokens} tokens expected to be cached were"
    missed = _share(canary.expected - canary.expected_cached, canary.expected)
    return _Comparison(
        f"{found}: at least {_percent(least)}",
        is_within=canary.cached_tokens >= least * canary.predicted_tokens,
        evidence=evidence_above(1 - least, missed),
        is_of_caches=True,
    )


def _share(count: int, total: int) -> Share:
    """Within what a share can be, whatever was reported."""
    return Share(max(0, min(count, total)), total)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"

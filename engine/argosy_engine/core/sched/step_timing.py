"""StepTiming: measures steps for the routers: prefill tokens per second, seconds per decode step, and the longest step.

It owns the smoothing and must not know what steps compute. A step's time begins when it is launched, or when the
previous step ended if that was later: with two steps in flight, the second one waits for the first.
"""

from __future__ import annotations

from argosy_engine.messages.scheduler_output import SchedulerOutput

KEPT = 0.8
"""Weight of the previous average when a step is added."""
_MIN_PREFILL_TOKENS = 256
"""Prefill steps with fewer tokens are ignored, because their fixed cost dominates. A replica that has only seen short
prompts, or the ends of cached ones, would look ten times slower than it is, and the routers would avoid it."""
_PREFILL_TOKENS_PER_REQUEST = 4
"""From this average on, a step counts as prefill. With fewer tokens per request, but more than one, prefill and decode
are mixed and neither rate can be measured."""


_LONGEST_MEMORY_S = 120.0
"""Seconds of computation in which the longest step decays to about a third."""


class StepTiming:
    """Smoothed durations of the recent steps."""

    def __init__(self) -> None:
        self.longest_step_s = 0.0
        """Second longest of the recent steps; zero until measured. The longest one is left out because it may be a
        kernel's compilation or a pause of the process (a suspended machine, a debugger), and liveness limits, which are
        multiples of this value, must not grow by it."""
        self._outlier_s = 0.0
        """Longest of the recent steps."""
        self.decode_step_s = 0.0
        """Smoothed duration of a decode step; zero until measured."""
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._last_end_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Smoothed prefill rate, weighted by the steps' durations; zero until measured."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def ended(self, step: SchedulerOutput, launched_s: float, ended_s: float) -> None:
        """Add a step that has ended.

        Args:
            launched_s: time before any of the step was computed, by `time.perf_counter()`.
            ended_s: time of its end, by the same clock.
        """
        seconds = ended_s - max(launched_s, self._last_end_s)
        self._last_end_s = ended_s
        kept = 1.0 - min(1.0, seconds / _LONGEST_MEMORY_S)
        longest, outlier = kept * self.longest_step_s, kept * self._outlier_s
        self.longest_step_s = max(longest, min(seconds, outlier))
        self._outlier_s = max(outlier, seconds)
        tokens, requests = step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)
        if not tokens:
            return
        if tokens == requests:
            known = self.decode_step_s or seconds
            self.decode_step_s = KEPT * known + (1.0 - KEPT) * seconds
        elif tokens >= max(_MIN_PREFILL_TOKENS, _PREFILL_TOKENS_PER_REQUEST * requests):
            self._prefill_tokens = KEPT * self._prefill_tokens + tokens
            self._prefill_s = KEPT * self._prefill_s + seconds

"""How fast steps are, for the router: prompt tokens per second, seconds per decode step, and the longest step.

Owns: the smoothing. Must not know: what steps compute.
A step's time begins when it is launched, or when the step before it ended if that was later: with two in flight, the
second one waits for the first.
"""

from __future__ import annotations

from argosy_engine.worker.step import SchedulerOutput

_KEPT = 0.8
"""Share of the past after each step."""
_MIN_PREFILL_TOKENS = 256
"""Below this a step's fixed cost is most of it. A replica that has only seen short prompts, or the ends of cached ones,
would look ten times slower than it is, and be passed over for that."""
_PREFILL_TOKENS_PER_REQUEST = 4
"""From here on a step is mostly prefill; less, but more than one, is a mixture that tells neither rate."""


_LONGEST_MEMORY_S = 120.0
"""Seconds of computing in which the longest step loses about two thirds of its weight."""


class StepTiming:
    def __init__(self) -> None:
        self.longest_step_s = 0.0
        """Of the recent ones, the very longest left out: that may be a kernel's compilation, or a pause of the process
        (a suspended machine, a debugger), and a core that once paused for long must not be trusted with another pause
        of five times that. Zero until measured."""
        self._outlier_s = 0.0
        """The very longest."""
        self.decode_step_s = 0.0
        """Zero until measured."""
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._last_end_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Zero until measured. Long steps count for more."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    def ended(self, step: SchedulerOutput, launched_s: float, ended_s: float) -> None:
        """Both on `time.perf_counter`'s clock; `launched_s` from before anything of the step was computed."""
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
            self.decode_step_s = _KEPT * known + (1.0 - _KEPT) * seconds
        elif tokens >= max(_MIN_PREFILL_TOKENS, _PREFILL_TOKENS_PER_REQUEST * requests):
            self._prefill_tokens = _KEPT * self._prefill_tokens + tokens
            self._prefill_s = _KEPT * self._prefill_s + seconds

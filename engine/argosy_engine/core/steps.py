"""Steps: one under construction, those whose output is not processed yet, and how long they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from argosy_engine.messages import BlockIds, EncoderInput, MultimodalFeature, NewRequest, SchedulerOutput

MAX_ENCODED_BYTES = 512 << 20
"""Of the tensors that a step encodes, which workers get in one message (`broadcast.MAX_MESSAGE_BYTES`)."""


class StepPlan:
    """Step under construction.

    Args:
        token_budget: tokens that the step may compute.
        prefill_budget: prefill tokens that the step may compute, within the token budget.
        long_prefill_token_threshold: cap on one request's prefill tokens; 0 means no cap.
        encoder_budget: embeddings that the step may compute; one item of more, or of more bytes than
            `MAX_ENCODED_BYTES`, may be alone in its step.
    """

    def __init__(
        self,
        token_budget: int,
        prefill_budget: int,
        long_prefill_token_threshold: int,
        encoder_budget: int = 0,
    ) -> None:
        self.token_budget = token_budget
        self._encoder_budget = encoder_budget
        self._num_encoded_bytes = 0
        self.encoder_inputs: list[EncoderInput] = []
        self.prefill_budget = prefill_budget
        self.batch_prefill_budget: int | None = None
        """Prefill tokens left for calls of several prompts, within `prefill_budget`; None means no cap."""
        self._threshold = long_prefill_token_threshold
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_requests: list[NewRequest] = []
        self.new_block_ids: dict[str, BlockIds] = {}
        self.drafts: dict[str, list[int]] = {}

    def limit(self, num_wanted: int, num_drafts: int = 0, *, is_batch: bool = False) -> int:
        """Return how many of the `num_wanted` tokens the budgets allow."""
        if num_wanted > 1 + num_drafts:  # a prefill, or a recomputation after preemption
            num_wanted = min(num_wanted, self.prefill_budget)
            if is_batch and self.batch_prefill_budget is not None:
                num_wanted = min(num_wanted, self.batch_prefill_budget)
            if self._threshold:
                num_wanted = min(num_wanted, self._threshold)
        return min(num_wanted, self.token_budget)

    def may_encode(self, item: MultimodalFeature) -> bool:
        """Whether the budgets allow one more item."""
        return not self.encoder_inputs or (
            item.num_embeds <= self._encoder_budget
            and self._num_encoded_bytes + item.num_bytes <= MAX_ENCODED_BYTES
        )

    def encode(self, item: MultimodalFeature) -> None:
        """Encode an item in this step; `may_encode` must have allowed it."""
        self.encoder_inputs.append(EncoderInput(item.identifier, item.modality, item.num_embeds, item.inputs))
        self._encoder_budget -= item.num_embeds
        self._num_encoded_bytes += item.num_bytes

    def add(self, request_id: str, num_tokens: int, num_drafts: int = 0, *, is_batch: bool = False) -> None:
        """Schedule tokens of a request; `limit` must have allowed them."""
        self.num_scheduled_tokens[request_id] = num_tokens
        self.token_budget -= num_tokens
        if num_tokens > 1 + num_drafts:
            self.prefill_budget = max(self.prefill_budget - num_tokens, 0)
            if is_batch and self.batch_prefill_budget is not None:
                self.batch_prefill_budget = max(self.batch_prefill_budget - num_tokens, 0)

    def drop(self, request_id: str) -> int:
        """Remove a request from the step; return the number of tokens that it would have computed."""
        num_tokens = self.num_scheduled_tokens.pop(request_id, 0)
        self.new_block_ids.pop(request_id, None)
        self.drafts.pop(request_id, None)
        self.token_budget += num_tokens
        return num_tokens

    def step(self, released: list[str], dropped: list[str]) -> SchedulerOutput:
        """Build the scheduler output.

        Args:
            released: ids of requests whose slots the worker frees before the step.
            dropped: identifiers of encoder outputs that it drops before.
        """
        return SchedulerOutput(
            self.new_requests,
            self.new_block_ids,
            self.num_scheduled_tokens,
            sum(self.num_scheduled_tokens.values()),
            released,
            self.drafts,
            encoder_inputs=self.encoder_inputs,
            freed_encoder_outputs=dropped,
        )


class StepsInFlight:
    """Queue of the steps whose output is not processed yet, with the requests for which they are stale.

    There is at most one, two with async scheduling, and one per stage with pipeline parallelism. A request may end, and
    a new one may take its id, while a step that computes it still runs. The output of that step for this id is then
    stale and must be dropped.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, set[str]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: SchedulerOutput) -> None:
        self._steps.append((step, set()))

    def pop(self, step: SchedulerOutput) -> Collection[str]:
        """Remove a step and all older ones, which were never computed; return the ids for which it is stale."""
        stale = self.stale(step)
        while self._steps and self._steps.popleft()[0] is not step:
            pass
        return stale

    def stale(self, step: SchedulerOutput) -> Collection[str]:
        """Return the ids of the requests for which the step's output must be dropped."""
        return next(stale for known, stale in self._steps if known is step)

    def __contains__(self, request_id: str) -> bool:
        """Whether a step in flight may still produce output for the request."""
        return any(
            request_id in step.num_scheduled_tokens and request_id not in stale for step, stale in self._steps
        )

    def forget(self, request_id: str) -> None:
        """Mark the steps in flight as stale for a request that has ended."""
        for step, stale in self._steps:
            if request_id in step.num_scheduled_tokens:
                stale.add(request_id)

    def forget_all(self) -> list[str]:
        """Mark the steps in flight as stale for all requests; return the ids whose slots they were to free."""
        for step, stale in self._steps:
            stale.update(step.num_scheduled_tokens)
        return [request_id for step, _ in self._steps for request_id in step.finished_request_ids]


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
    """Smoothed durations of the recent steps, for routers: prefill tokens per second, seconds per decode step, and the
    longest step.

    A step's time begins when it is launched, or when the previous step ended if that was later: with two steps in
    flight, the second one waits for the first.
    """

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

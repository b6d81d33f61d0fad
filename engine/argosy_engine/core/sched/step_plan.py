"""StepPlan: a step under construction, with the tokens scheduled for each request and what is left of the budgets."""

from __future__ import annotations

from argosy_engine.messages.scheduler_output import BlockIds, NewRequest, SchedulerOutput


class StepPlan:
    """Step under construction.

    Args:
        token_budget: tokens that the step may compute.
        prefill_budget: prefill tokens that the step may compute, within the token budget.
        long_prefill_token_threshold: cap on one request's prefill tokens; 0 means no cap.
    """

    def __init__(self, token_budget: int, prefill_budget: int, long_prefill_token_threshold: int) -> None:
        self.token_budget = token_budget
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

    def add(self, request_id: str, num_tokens: int, num_drafts: int = 0, *, is_batch: bool = False) -> None:
        """Schedule tokens of a request; `limit` must have allowed them."""
        self.num_scheduled_tokens[request_id] = num_tokens
        self.token_budget -= num_tokens
        if num_tokens > 1 + num_drafts:
            self.prefill_budget -= num_tokens
            if is_batch and self.batch_prefill_budget is not None:
                self.batch_prefill_budget -= num_tokens

    def drop(self, request_id: str) -> int:
        """Remove a request from the step; return the number of tokens that it would have computed."""
        num_tokens = self.num_scheduled_tokens.pop(request_id, 0)
        self.new_block_ids.pop(request_id, None)
        self.drafts.pop(request_id, None)
        self.token_budget += num_tokens
        return num_tokens

    def step(self, released: list[str]) -> SchedulerOutput:
        """Build the scheduler output.

        Args:
            released: ids of requests whose slots the worker frees before the step.
        """
        return SchedulerOutput(
            self.new_requests,
            self.new_block_ids,
            self.num_scheduled_tokens,
            sum(self.num_scheduled_tokens.values()),
            released,
            self.drafts,
        )

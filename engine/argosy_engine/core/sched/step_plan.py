"""StepPlan: a step under construction, with the tokens scheduled for each request and what is left of the budgets."""

from __future__ import annotations

from argosy_engine.messages.scheduler_output import BlockIds, NewRequest, SchedulerOutput


class StepPlan:
    """Step under construction.

    Args:
        budget: tokens that the step may compute.
        prefill_room: prefill tokens that the step may compute, within the budget.
        long_prefill_token_threshold: cap on one request's prefill tokens; 0 means no cap.
    """

    def __init__(self, budget: int, prefill_room: int, long_prefill_token_threshold: int) -> None:
        self.budget = budget
        self.prefill_room = prefill_room
        self.batch_room: int | None = None
        """Prefill tokens left for calls of several prompts, within `prefill_room`; None means no cap."""
        self._threshold = long_prefill_token_threshold
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_requests: list[NewRequest] = []
        self.new_block_ids: dict[str, BlockIds] = {}
        self.drafts: dict[str, list[int]] = {}

    def limit(self, num_wanted: int, num_drafts: int = 0, *, is_batch: bool = False) -> int:
        """Return how many of the `num_wanted` tokens the budgets allow."""
        if num_wanted > 1 + num_drafts:  # a prefill, or a recomputation after preemption
            num_wanted = min(num_wanted, self.prefill_room)
            if is_batch and self.batch_room is not None:
                num_wanted = min(num_wanted, self.batch_room)
            if self._threshold:
                num_wanted = min(num_wanted, self._threshold)
        return min(num_wanted, self.budget)

    def add(self, request_id: str, num_tokens: int, num_drafts: int = 0, *, is_batch: bool = False) -> None:
        """Schedule tokens of a request; `limit` must have allowed them."""
        self.num_scheduled_tokens[request_id] = num_tokens
        self.budget -= num_tokens
        if num_tokens > 1 + num_drafts:
            self.prefill_room -= num_tokens
            if is_batch and self.batch_room is not None:
                self.batch_room -= num_tokens

    def drop(self, request_id: str) -> int:
        """Remove a request from the step; return the number of tokens that it would have computed."""
        num_tokens = self.num_scheduled_tokens.pop(request_id, 0)
        self.new_block_ids.pop(request_id, None)
        self.drafts.pop(request_id, None)
        self.budget += num_tokens
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

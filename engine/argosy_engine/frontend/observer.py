"""Observer: the interface of metrics and telemetry, which watch outputs on their way to clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from argosy_engine.frontend.request_record import current_record
from argosy_engine.messages.core_messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.params.sampling_params import SamplingParams
from argosy_protocol.skipped_content import Skipped

SkippingApi = Literal["chat_completions", "messages", "responses"]
"""The APIs whose history may have what no model here reads."""


class Choices:
    """The choices of one prompt, of which each is a request of the core; read by the metrics."""

    __slots__ = ("is_recorded", "longest", "num_choices", "num_left")

    def __init__(self, num_choices: int = 1) -> None:
        self.num_choices = num_choices
        self.num_left = num_choices
        """Choices that have not ended."""
        self.longest = 0
        """Output tokens of the longest choice that has ended."""
        self.is_recorded = False
        """Whether the prompt counts in the record of its request."""

    def end(self, num_output: int) -> bool:
        """Record that a choice ended with a number of output tokens; return whether it was the last one."""
        self.longest = max(self.longest, num_output)
        self.num_left -= 1
        return not self.num_left


class RequestTimings:
    """When a request reached its milestones, in monotonic seconds, and where; read by the metrics."""

    __slots__ = (
        "arrived",
        "choices",
        "engine_index",
        "first_token",
        "last_token",
        "max_tokens",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "params",
        "prefill_s",
        "queued_s",
        "record",
    )

    def __init__(
        self,
        choices: Choices | None = None,
        max_tokens: int | None = None,
        *,
        num_prompt: int = 0,
        params: SamplingParams | None = None,
    ) -> None:
        """
        Args:
            num_prompt: number of prompt tokens.
            params: of a request that generates text.
        """
        self.choices = choices or Choices()
        self.max_tokens = max_tokens
        """Upper bound of the output tokens; None: it generates no text."""
        self.num_prompt = num_prompt
        self.params = params
        self.record = current_record.get()
        """That of the HTTP request; None without one."""
        self.num_preemptions = 0
        self.arrived = time.monotonic()
        self.first_token = 0.0
        self.last_token = 0.0
        self.engine_index = 0
        """Data-parallel rank of the core that computes the request; 0 before it is sent."""
        self.num_cached = 0
        """prompt tokens found in the prefix cache"""
        self.queued_s = 0.0
        self.prefill_s = 0.0


TokenWatcher = Callable[[RequestTimings, int, float, bool], None]
"""The method `on_tokens` of an observer."""


class Observer:
    """Base class whose methods do nothing; a subclass overrides those that it needs. Called on the event loop."""

    watches_tokens: ClassVar[bool] = False
    """Whether it overrides `on_tokens`, which is called for each token."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.watches_tokens = cls.on_tokens is not Observer.on_tokens

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        """The core sent a message."""

    def on_lost(self, timings: RequestTimings) -> None:
        """A request was failed because the core no longer knew it."""

    def on_rejected(self, reason: str, rank: int) -> None:
        """A call was rejected because too many requests or tokens are queued.

        Args:
            reason: name of the limit, `max_num_queued_reqs` or `max_num_queued_tokens`.
            rank: data-parallel rank that it chose, else 0.
        """

    def on_tools_parsed(self, has_calls: bool, is_stream: bool, api: str) -> None:
        """A choice of a request with tools ended. May be called from any thread.

        Args:
            has_calls: whether it calls a tool.
            api: `chat_completions`, `responses` or `other`.
        """

    def on_relaxed(self, keywords: Sequence[str]) -> None:
        """Keywords of the schemas of a request's tools are not enforced, though its calls are."""

    def on_skipped(self, api: SkippingApi, skipped: Skipped) -> None:
        """A request was translated into a chat, which leaves out what `skipped` has."""

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        """A request got tokens.

        Args:
            timings: not updated yet: `last_token` is the time of the output before this one.
            now: when the output was received, in monotonic seconds.
            is_first: this is the request's first output.
        """

    def on_prefix_hit(self, request: EngineCoreRequest, num_cached: int) -> None:
        """A request's first output has come, and the first `num_cached` tokens of its prompt were cached. Called for
        the first choice of each prompt, and only if some were."""

    def on_finished(self, timings: RequestTimings, num_prompt: int, num_output: int, reason: str) -> None:
        """A request ended. Called exactly once for each request, however it ended.

        Args:
            reason: a finish reason; `abort` if its client left or the engine was told to drop it, `error` if it failed.
        """

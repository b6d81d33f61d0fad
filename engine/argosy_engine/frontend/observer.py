"""Observer: the interface of metrics and telemetry, which watch outputs on their way to clients.

`RequestTimings` are those of one choice; `RequestRecord` is what is known of one HTTP request, filled in on its way for
its line in the log and its spans. The choices that a request generates find its record by a context variable. Neither
has a text of a prompt or an output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import ClassVar, Literal

from argosy_engine.messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_protocol.errors import NO_REASON
from argosy_protocol.skipped_content import Skipped

MAX_FINISH_REASONS = 8


class RequestRecord:
    """One request. What does not apply is empty, None or zero."""

    __slots__ = (
        "arrived",
        "cached_tokens",
        "completion_tokens",
        "error",
        "finish_reasons",
        "first_byte",
        "is_relayed",
        "method",
        "model",
        "parent",
        "path",
        "prompt_tokens",
        "queued_s",
        "request_id",
        "status",
        "tenant",
        "trace_headers",
    )

    def __init__(self, method: str, path: str, trace_headers: dict[str, str]) -> None:
        """`trace_headers` are the client's `traceparent` and `tracestate`."""
        self.method = method
        self.path = path
        self.trace_headers = trace_headers
        self.parent: object = None
        """The trace context in these headers, once a span was made."""
        self.arrived = time.monotonic()
        self.request_id = ""
        """The id of the answer."""
        self.model = ""
        """As the client named it, or what the engine calls it if the client names none."""
        self.tenant = ""
        self.status = 0
        """0: its client left before it was answered."""
        self.error = NO_REASON
        """Why the request was refused or failed, if its answer says so."""
        self.is_relayed = False
        """Whether another API process answers the request, and so has a record of it that is logged."""
        self.first_byte: float | None = None
        """When the answer's body began, in monotonic seconds."""
        self.prompt_tokens: int | None = None
        """Of all prompts that were computed, each once, however many choices it has."""
        self.cached_tokens = 0
        """Those of them that were found in the prefix cache."""
        self.completion_tokens = 0
        """Of all choices."""
        self.queued_s = 0.0
        """Time in the queue of the prompt that waited longest."""
        self.finish_reasons: list[str] = []
        """Different ones, in the order of their occurrence."""

    def add_prompt(self, num_tokens: int, num_cached: int, queued_s: float) -> None:
        """Count a prompt whose first token has been computed."""
        self.prompt_tokens = (self.prompt_tokens or 0) + num_tokens
        self.cached_tokens += num_cached
        self.queued_s = max(self.queued_s, queued_s)

    def add_choice(self, num_tokens: int, finish_reason: str) -> None:
        """Count a choice that has ended."""
        self.completion_tokens += num_tokens
        if finish_reason not in self.finish_reasons and len(self.finish_reasons) < MAX_FINISH_REASONS:
            self.finish_reasons.append(finish_reason)


current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)
"""The record of the request that the current task answers; None if no records are made."""


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

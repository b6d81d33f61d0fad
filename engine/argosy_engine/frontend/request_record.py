"""RequestRecord: what is known of one HTTP request, filled in on its way, for its line in the log and its spans.

Owns: the figures, and the context variable by which the choices that a request generates find its record.
Must not know: HTTP, formats of lines and spans, prompts and texts.
"""

from __future__ import annotations

import time
from contextvars import ContextVar

from argosy_protocol.errors import NO_REASON

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

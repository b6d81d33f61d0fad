"""Observer: the interface of metrics and telemetry, which watch outputs on their way to clients."""

from __future__ import annotations

import time

from argosy_engine.messages.core_messages import EngineCoreOutputs


class RequestTimings:
    """When a request reached its milestones, in monotonic seconds, and where; read by the metrics."""

    __slots__ = (
        "arrived",
        "engine_index",
        "first_token",
        "last_token",
        "num_cached",
        "prefill_s",
        "queued_s",
    )

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        self.first_token = 0.0
        self.last_token = 0.0
        self.engine_index = 0
        """Data-parallel rank of the core that computes the request; 0 before it is sent."""
        self.num_cached = 0
        """prompt tokens found in the prefix cache"""
        self.queued_s = 0.0
        self.prefill_s = 0.0


class Observer:
    """Base class whose methods do nothing; a subclass overrides those that it needs. Called on the event loop."""

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        """The core sent a message."""

    def on_lost(self, timings: RequestTimings) -> None:
        """A request was failed because the core no longer knew it."""

    def on_tokens(self, timings: RequestTimings, count: int, now: float, is_first: bool) -> None:
        """A request got tokens.

        Args:
            timings: not updated yet: `last_token` is the time of the output before this one.
            now: when the output was received, in monotonic seconds.
            is_first: this is the request's first output.
        """

    def on_finished(self, timings: RequestTimings, num_prompt: int, num_output: int, reason: str) -> None:
        """A request ended. Called exactly once for each request, however it ended.

        Args:
            reason: a finish reason; `abort` if its client left or the engine was told to drop it, `error` if it failed.
        """

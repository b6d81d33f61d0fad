"""What a generation yields: `GenerationOutput` deltas, and the collector between the core's pace and the reader's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from argosy_engine.sample.token_logprobs import TokenLogprobs

logger = logging.getLogger("argosy.frontend")


@dataclass(slots=True)
class GenerationOutput:
    """New text and tokens of one choice since the last output; the counts are totals."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token of `token_ids`, if the request asked for them."""
    resumed_text: str = ""
    """With a choice's first output: text of the run that this one continues. Its reader has it already."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all prompt tokens but the first, with a choice's first output, if the request asked for them."""
    embedding: list[float] | None = None
    """The prompt's vector, if that was asked for; there are no tokens then, and this is the only output."""

    def merge(self, later: GenerationOutput) -> None:
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_prompt_tokens = later.num_prompt_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.num_output_tokens = later.num_output_tokens
        self.resumed_text += later.resumed_text
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


class OutputCollector:
    """One slot per choice: when the reader lags, outputs merge instead of queueing. A choice thus never holds more than
    its whole output, however slow its reader."""

    def __init__(self) -> None:
        self._pending: dict[int, GenerationOutput] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self.taken_at = time.monotonic()
        """When the reader last took something."""

    @property
    def num_pending(self) -> int:
        """Choices with outputs that the reader has not taken."""
        return len(self._pending)

    def put(self, output: GenerationOutput) -> None:
        earlier = self._pending.get(output.index)
        if earlier is None:
            self._pending[output.index] = output
        else:
            earlier.merge(output)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def take(self) -> list[GenerationOutput]:
        """Everything that arrived since the last call; waits for something.

        Raises:
            EngineError: the request failed; outputs that came before are still delivered first.
        """
        await self._ready.wait()
        if not self._pending and self._error is not None:
            raise self._error
        self.taken_at = time.monotonic()
        outputs = list(self._pending.values())
        self._pending.clear()
        if self._error is None:
            self._ready.clear()
        return outputs


def log_failures(errors: Sequence[str | None]) -> None:
    """Tells that some results of a batch have an error, for users who look at texts only."""
    failed = [error for error in errors if error is not None]
    if failed:
        logger.error("%d of %d requests failed, the first with: %s", len(failed), len(errors), failed[0])

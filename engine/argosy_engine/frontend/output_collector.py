"""OutputCollector: buffers outputs between the core and the reader of one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from argosy_engine.frontend.outputs import GenerationOutput

MAX_MERGED_VALUES = 4096
"""Outputs of a choice are merged until they have so many tokens and log probabilities, which makes an event of some
150 KB. Routers and proxies refuse events that are much larger."""


class OutputCollector:
    """Buffer of a call's outputs. While the reader lags behind, outputs of a choice are merged, so a choice never holds
    more than its complete output, however slow the reader is, and few outputs.

    Args:
        on_delta: takes an output at once in the reader's place, and returns whether it did; else the reader gets it. It
            is called while the reader waits and nothing is pending, with outputs between a choice's first and last.
        num_awaited: number of choices whose ends the reader waits for, because it has no use for parts; 0: it takes
            outputs as they come.
    """

    def __init__(
        self, on_delta: Callable[[GenerationOutput], bool] | None = None, *, num_awaited: int = 0
    ) -> None:
        self._on_delta = on_delta
        self._takes_parts = not num_awaited
        self._num_awaited = num_awaited
        """Choices that must end before the reader wakes."""
        self._pending: list[GenerationOutput] = []
        self._last: dict[int, GenerationOutput] = {}
        """The last pending output of each choice, into which the next one is merged."""
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits."""
        self.taken_at = time.monotonic()
        """When the reader last took outputs, in monotonic seconds."""

    @property
    def num_pending(self) -> int:
        """Choices with outputs that the reader has not taken."""
        return len(self._last)

    def put(self, output: GenerationOutput) -> bool:
        """Add an output; return whether the reader is awake then, and would take what comes next apart from it."""
        if self._error is not None:
            return True  # nothing follows what is missing
        if self._on_delta is not None and self._is_delta(output):
            try:
                if self._on_delta(output):
                    self.taken_at = time.monotonic()
                    return False
            except Exception as error:  # the reader's own, as if it had met it after `take`
                self.fail(error)
                return True
        earlier = self._last.get(output.index)
        if earlier is None or earlier.num_values >= MAX_MERGED_VALUES:
            self._last[output.index] = output
            self._pending.append(output)
        else:
            earlier.merge(output)
        if self._takes_parts:
            self._wake_reader()
            return True
        if output.finish_reason is not None:
            self._num_awaited -= 1
            if self._num_awaited <= 0:
                self._wake_reader()
        return False

    def fail(self, error: Exception) -> None:
        """Have `take` raise this error once the reader has taken what came before it."""
        self._error = error
        self._wake_reader()

    async def take(self) -> list[GenerationOutput]:
        """Wait for outputs, and take everything that has arrived since the last call. Only one task may wait at a time.

        A reader that waits for complete choices takes everything once they have ended.

        Raises:
            EngineError: the request failed; parts that came before are still delivered first.
        """
        while not self._pending or self._num_awaited > 0:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self.taken_at = time.monotonic()
        outputs, self._pending = self._pending, []
        self._last.clear()
        return outputs

    def _is_delta(self, output: GenerationOutput) -> bool:
        """Whether `on_delta` may take an output."""
        is_between = output.finish_reason is None and output.num_output_tokens > len(output.token_ids)
        return is_between and self._is_reader_waiting and not self._pending and self._error is None

    @property
    def _is_reader_waiting(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

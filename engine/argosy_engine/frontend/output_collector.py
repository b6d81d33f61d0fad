"""OutputCollector: buffers outputs between the core and the reader of one call."""

from __future__ import annotations

import asyncio
import time

from argosy_engine.frontend.outputs import GenerationOutput


class OutputCollector:
    """Buffer with one slot per choice. While the reader lags behind, outputs of a choice are merged, so a choice never
    holds more than its complete output, however slow the reader is."""

    def __init__(self) -> None:
        self._pending: dict[int, GenerationOutput] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self.taken_at = time.monotonic()
        """When the reader last took outputs, in monotonic seconds."""

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
        """Have `take` raise this error once the reader has taken what came before it."""
        self._error = error
        self._ready.set()

    async def take(self) -> list[GenerationOutput]:
        """Wait for outputs, and take everything that has arrived since the last call.

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

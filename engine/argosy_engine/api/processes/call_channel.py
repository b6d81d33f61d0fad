"""CallChannel: the first API process calls another one, and waits for its answers.

Calls overlap: a drain may wait for minutes while metrics are asked for. The stream ends when either process does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import msgspec

from argosy_engine.api.processes.frames import Stream, read_frame, write_frame
from argosy_engine.api.processes.process_messages import Answer, Call, NumberedCall, Ping
from argosy_engine.errors import EngineDead, UtilityFailed

Handler = Callable[[Call], Awaitable[list[float]]]

PING_INTERVAL_S = 5.0
"""How long a call is waited for before the process is asked whether it still answers, and again."""
PING_TIMEOUT_S = 10.0
"""An event loop that answers no ping for this long serves nobody."""


class ProcessStandsStill(UtilityFailed):
    """A process exists and does not answer: it is stopped, swapped out, or stuck in a system call."""


class CallChannel:
    """The caller's end.

    Args:
        name: the other process's, for errors.
    """

    def __init__(self, name: str, stream: Stream) -> None:
        self._name = name
        self._reader, self._writer = stream
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[list[float]]] = {}
        self.is_closed = False

    async def call(self, call: Call) -> list[float]:
        """Call the process and return its answer. A task must be in `read` meanwhile.

        Raises:
            UtilityFailed: the call failed; the message names the process.
            EngineDead: the process ended.
        """
        if self.is_closed:
            raise self._gone()
        number = next(self._numbers)
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            write_frame(self._writer, NumberedCall(number, call))
            return await future
        finally:
            del self._calls[number]

    async def call_unless_still(
        self, call: Call, *, interval_s: float = PING_INTERVAL_S, timeout_s: float = PING_TIMEOUT_S
    ) -> list[float]:
        """Call the process and return its answer, however long that takes while it answers pings.

        Args:
            interval_s: between pings.
            timeout_s: of a ping.

        Raises:
            ProcessStandsStill: it did not answer a ping. It carries the call out once it goes on.
            UtilityFailed, EngineDead: as `call`.
        """
        calling = asyncio.create_task(self.call(call), name=f"call of {self._name}")
        try:
            while not calling.done():
                await asyncio.wait({calling}, timeout=interval_s)
                if not calling.done():
                    async with asyncio.timeout(timeout_s):
                        await self.call(Ping())
            return await calling
        except TimeoutError:
            raise ProcessStandsStill(f"{self._name} has not answered for {timeout_s:g} s") from None
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def read(self) -> None:
        """Deliver the answers, until the process ends."""
        decoder = msgspec.msgpack.Decoder(Answer)
        try:
            while (payload := await read_frame(self._reader)) is not None:
                answer = decoder.decode(payload)
                future = self._calls.get(answer.number)
                if future is None or future.done():
                    continue  # nobody waits any more
                if answer.error is None:
                    future.set_result(answer.values)
                else:
                    future.set_exception(UtilityFailed(f"{self._name}: {answer.error}"))
        finally:
            self.is_closed = True
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(self._gone())

    def close(self) -> None:
        self._writer.close()

    def _gone(self) -> EngineDead:
        return EngineDead(f"{self._name} has ended")


async def answer_calls(stream: Stream, handle: Handler) -> None:
    """Answer calls, each in a task of its own, until the caller ends. Closes the stream then.

    Args:
        handle: carries a call out and returns its values; an exception of it becomes the answer.
    """
    reader, writer = stream
    decoder = msgspec.msgpack.Decoder(NumberedCall)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(numbered: NumberedCall) -> None:
        try:
            reply = Answer(numbered.number, values=await handle(numbered.call))
        except Exception as error:
            reply = Answer(numbered.number, str(error) or type(error).__name__)
        write_frame(writer, reply)

    try:
        while (payload := await read_frame(reader)) is not None:
            task = asyncio.create_task(answer(decoder.decode(payload)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        writer.close()

"""AsyncMPClient: the asyncio client of an engine core that runs in its own process. See `core_client`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.core.proc.core_client import POLL_MS, bind, close_all, result_of
from argosy_engine.core.proc.core_handle import START_TIMEOUT_S, CoreHandle
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.messages.core_messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestType,
    UtilityCall,
    UtilityOutput,
)


class AsyncClient(Protocol):
    """Interface that `AsyncLLM` needs from a client, of one core or several."""

    config: ResolvedConfig

    @property
    def pids(self) -> list[int]: ...

    async def add_request(self, request: EngineCoreRequest) -> None: ...

    async def abort_requests(self, request_ids: list[str]) -> None: ...

    async def call_utility(self, method: str, *args: Any) -> Any: ...

    def outputs(self) -> AsyncGenerator[EngineCoreOutputs]: ...

    async def close(self) -> None: ...


class AsyncMPClient:
    """Client of a core in its own process. Create it with `start`."""

    def __init__(self, handle: CoreHandle) -> None:
        self._handle = handle
        self._context = zmq.asyncio.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._input, self._output = bind(self._context, handle)
        self._call_ids: Iterator[int] = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._has_ended = asyncio.Event()
        """Set once the outputs are no longer read, so that no call can be answered."""
        self.config: ResolvedConfig

    @classmethod
    async def start(
        cls, args: EngineArgs, rank: int = 0, lockstep: LockstepEnds | None = None
    ) -> AsyncMPClient:
        """Start the core process and wait until its model is loaded.

        Args:
            rank: data-parallel rank of the core.
            lockstep: of cores that share experts.

        Raises:
            ConfigError: the core rejects its arguments; the message is meant for the person who started it.
            EngineDead: the core died while starting.
        """
        handle = CoreHandle(args, rank, lockstep)
        client = cls(handle)
        try:
            handle.start()  # fork and exec take milliseconds, once
            async with asyncio.timeout(START_TIMEOUT_S):
                client.config = await client._shake_hands()
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise EngineDead(f"the engine core was not ready after {START_TIMEOUT_S:.0f} s") from None
            raise
        return client

    async def _shake_hands(self) -> ResolvedConfig:
        exited = asyncio.ensure_future(self._exit())
        try:
            while self._handle.config is None:
                receive = asyncio.ensure_future(self._output.recv())
                await asyncio.wait({receive, exited}, return_when=asyncio.FIRST_COMPLETED)
                await self._await_last(receive)
                if not receive.done():
                    receive.cancel()
                    raise self._handle.dead(" while starting")
                reply = self._handle.greeting(await receive)
                if reply is not None:
                    send = asyncio.ensure_future(self._input.send_multipart(reply))
                    await asyncio.wait({send, exited}, return_when=asyncio.FIRST_COMPLETED)
                    if not send.done():
                        send.cancel()
                        raise self._handle.dead(" while starting")
        finally:
            exited.cancel()
        return self._handle.config

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core. Raises EngineDead if the core has died."""
        await self._send([RequestType.ADD, self._encoder.encode(request)])

    async def abort_requests(self, request_ids: list[str]) -> None:
        with contextlib.suppress(EngineDead):
            await self._send([RequestType.ABORT, self._encoder.encode(request_ids)])

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility of the core and wait for its result. A task must be reading `outputs` meanwhile.

        Raises:
            UtilityFailed: the core has no such utility, or it failed.
            EngineDead: the core died.
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            call = UtilityCall(call_id, method, list(args))
            await self._send([RequestType.UTILITY, self._encoder.encode(call)])
            return await future
        finally:
            del self._calls[call_id]

    async def outputs(self) -> AsyncGenerator[EngineCoreOutputs]:
        """Yield everything that the core sends, until it dies.

        Raises:
            EngineDead: the process ended, or announced that it is dying.
        """
        receive = asyncio.ensure_future(self._output.recv())
        exited = asyncio.ensure_future(self._exit())
        try:
            while True:
                await asyncio.wait({receive, exited}, return_when=asyncio.FIRST_COMPLETED)
                await self._await_last(receive)
                if receive.done():
                    outputs = self._decoder.decode(receive.result())
                    if outputs.dead is not None:
                        self._handle.reason = outputs.dead
                        raise self._handle.dead()
                    if outputs.utility is not None:
                        self._resolve(outputs.utility)
                    receive = asyncio.ensure_future(self._output.recv())
                    yield outputs
                else:
                    raise self._handle.dead()
        finally:
            receive.cancel()
            exited.cancel()
            self._has_ended.set()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(self._gone())

    async def _send(self, message: list[bytes]) -> None:
        """Send a message without blocking: the queue has no limit, so only a dead core cannot take it."""
        if self._handle.poll() is not None:
            await self._await_reason()
            raise self._handle.dead()
        if self._has_ended.is_set():
            raise self._gone()
        try:
            await self._input.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            await self._await_reason()
            raise self._gone() from None

    def _gone(self) -> EngineDead:
        """Return the error of a call that a core cannot answer, whose end may not be known."""
        is_known = self._handle.reason or self._handle.poll() is not None
        return self._handle.dead() if is_known else EngineDead("nobody reads what the engine core answers")

    async def _await_reason(self) -> None:
        """Wait until the outputs are read to their end, which may tell why the core has ended."""
        if not self._handle.reason:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), self._handle.last_message_ms / 1000)

    def _resolve(self, answer: UtilityOutput) -> None:
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        try:
            future.set_result(result_of(answer))
        except UtilityFailed as error:
            future.set_exception(error)

    async def _await_last(self, receive: asyncio.Future[Any]) -> None:
        """If a message has not arrived and the core has ended, wait for its last one, which says why."""
        if not receive.done():
            await asyncio.wait({receive}, timeout=self._handle.last_message_ms / 1000)

    async def _exit(self) -> None:
        """Wait until the core has ended: on its pidfd, or by polling where there is none."""
        pidfd = self._handle.pidfd
        if pidfd is None:
            while self._handle.poll() is None:  # noqa: ASYNC110 (no event tells it here)
                await asyncio.sleep(POLL_MS / 1000)
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pidfd, _set_done, ended)
        try:
            await ended
        finally:
            loop.remove_reader(pidfd)
        self._handle.poll()

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def pids(self) -> list[int]:
        """The processes of all cores."""
        return [self.pid]

    async def close(self) -> None:
        """End the core and close the sockets, even if the caller is cancelled meanwhile."""
        ending = asyncio.ensure_future(asyncio.to_thread(self._handle.end))
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        close_all(self._context, self._input, self._output)
        ending.result()
        if cancelled is not None:
            raise cancelled


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""Clients of the engine core: one in the same process, two over ZMQ to a process of its own.

All speak the same messages to the same `EngineCore`:

InprocClient    calls it directly: offline use and tests
SyncMPClient    blocking: offline use with the core in its own process
AsyncMPClient   asyncio: the API server

A client owns the core's life: when it closes (or dies), the core ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.core.launch import START_TIMEOUT_S, CoreHandle
from argosy_engine.core.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.errors import EngineDead, UtilityFailed

_POLL_MS = 200
"""Where the system has no pidfd, how often a client looks whether the core still lives."""


class SyncClient(Protocol):
    """What `LLM` and `LLMEngine` need of a client."""

    config: ResolvedConfig

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def step(self) -> EngineCoreOutputs:
        """What the core's next step gave; call it only while `has_work`."""
        ...

    def call_utility(self, method: str, *args: Any) -> Any: ...

    def close(self) -> None: ...


class InprocClient:
    """The core as an object of this process."""

    def __init__(self, args: EngineArgs) -> None:
        from argosy_engine.core.engine_core import EngineCore
        from argosy_engine.executor.factory import make_executor

        self.core = EngineCore(args, make_executor(args))
        self.config: ResolvedConfig = self.core.config

    @property
    def has_work(self) -> bool:
        return self.core.has_work or self.core.structured.is_waiting

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(request_ids)

    def step(self) -> EngineCoreOutputs:
        if not self.core.has_work:
            self.core.structured.wait()
        return self.core.step()

    def call_utility(self, method: str, *args: Any) -> Any:
        """Raises UtilityFailed if the core knows no such utility or it failed."""
        return _result(self.core.call_utility(UtilityCall(0, method, list(args))))

    def close(self) -> None:
        self.core.shutdown()


class SyncMPClient:
    """The core in a process of its own, for callers that block.

    Raises (from the constructor):
        ConfigError: the core refuses its arguments; the message is for the person who started it.
        EngineDead: the core died while starting; from every method: it died later.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._call_ids: Iterator[int] = itertools.count()
        self._unfinished: set[str] = set()
        self._pending: deque[EngineCoreOutputs] = deque()
        self._handle = CoreHandle(args)
        self._input, self._output = _bind(self._context, self._handle)
        try:
            self._handle.start()
            deadline = time.monotonic() + START_TIMEOUT_S
            while self._handle.config is None:
                reply = self._handle.greeting(self._receive(deadline, " while starting"))
                if reply is not None:
                    self._input.send_multipart(reply)
        except BaseException:
            self.close()
            raise
        self.config: ResolvedConfig = self._handle.config

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._unfinished.add(request.request_id)
        self._input.send_multipart([RequestType.ADD, self._encoder.encode(request)])

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        aborted = list(request_ids)
        self._unfinished.difference_update(aborted)
        self._input.send_multipart([RequestType.ABORT, self._encoder.encode(aborted)])

    def step(self) -> EngineCoreOutputs:
        outputs = self._pending.popleft() if self._pending else self._next()
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
        return outputs

    def call_utility(self, method: str, *args: Any) -> Any:
        """Raises UtilityFailed if the core knows no such utility or it failed."""
        call_id = next(self._call_ids)
        call = UtilityCall(call_id, method, list(args))
        self._input.send_multipart([RequestType.UTILITY, self._encoder.encode(call)])
        while True:
            outputs = self._next()
            if outputs.utility is not None and outputs.utility.call_id == call_id:
                return _result(outputs.utility)
            if outputs.outputs:
                self._pending.append(outputs)

    def close(self) -> None:
        self._handle.end()
        _close(self._context, self._input, self._output)

    def _next(self) -> EngineCoreOutputs:
        outputs = self._decoder.decode(self._receive(None))
        if outputs.dead is not None:
            raise EngineDead(outputs.dead)
        return outputs

    def _receive(self, deadline: float | None, doing: str = "") -> bytes:
        """The core's next message; EngineDead as soon as it has ended without one."""
        poller = zmq.Poller()
        poller.register(self._output, zmq.POLLIN)
        if self._handle.pidfd is not None:
            poller.register(self._handle.pidfd, zmq.POLLIN)
        while not self._output.poll(0):
            if self._handle.poll() is not None and not self._output.poll(0):
                raise self._handle.dead(doing)
            if deadline is not None and time.monotonic() > deadline:
                raise EngineDead(f"the engine core was not ready after {START_TIMEOUT_S:.0f} s")
            poller.poll(_POLL_MS if self._handle.pidfd is None or deadline is not None else None)
        return bytes(self._output.recv())


class AsyncMPClient:
    """The core in a process of its own. Create it with `start`."""

    def __init__(self, handle: CoreHandle) -> None:
        self._handle = handle
        self._context = zmq.asyncio.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._input, self._output = _bind(self._context, handle)
        self._call_ids: Iterator[int] = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.config: ResolvedConfig

    @classmethod
    async def start(cls, args: EngineArgs) -> AsyncMPClient:
        """Starts the core process and waits until its model is loaded.

        Raises:
            ConfigError: the core refuses its arguments; the message is for the person who started it.
            EngineDead: the core died while starting.
        """
        handle = CoreHandle(args)
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
                if not receive.done() and not await self._output.poll(0):
                    receive.cancel()
                    raise self._handle.dead(" while starting")
                reply = self._handle.greeting(await receive)
                if reply is not None:
                    await self._input.send_multipart(reply)
        finally:
            exited.cancel()
        return self._handle.config

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._input.send_multipart([RequestType.ADD, self._encoder.encode(request)])

    async def abort_requests(self, request_ids: list[str]) -> None:
        await self._input.send_multipart([RequestType.ABORT, self._encoder.encode(request_ids)])

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a utility of the core and waits for its result; someone must be reading `outputs`.

        Raises:
            UtilityFailed: the core knows no such utility, or it failed.
            EngineDead: the core died.
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            call = UtilityCall(call_id, method, list(args))
            await self._input.send_multipart([RequestType.UTILITY, self._encoder.encode(call)])
            return await future
        finally:
            del self._calls[call_id]

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        """Everything the core sends, until it dies.

        Raises:
            EngineDead: the process ended or said that it dies.
        """
        receive = asyncio.ensure_future(self._output.recv())
        exited = asyncio.ensure_future(self._exit())
        try:
            while True:
                await asyncio.wait({receive, exited}, return_when=asyncio.FIRST_COMPLETED)
                if receive.done():
                    outputs = self._decoder.decode(receive.result())
                    if outputs.dead is not None:
                        raise EngineDead(outputs.dead)
                    if outputs.utility is not None:
                        self._resolve(outputs.utility)
                    receive = asyncio.ensure_future(self._output.recv())
                    yield outputs
                elif exited.done():
                    raise self._handle.dead()
        finally:
            receive.cancel()
            exited.cancel()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineDead("the engine core is gone"))

    def _resolve(self, answer: UtilityOutput) -> None:
        future = self._calls.get(answer.call_id)
        if future is None or future.done():
            return
        try:
            future.set_result(_result(answer))
        except UtilityFailed as error:
            future.set_exception(error)

    async def _exit(self) -> None:
        """Returns when the core has ended, noticed by its pidfd: an event, no polling."""
        pidfd = self._handle.pidfd
        if pidfd is None:
            while self._handle.poll() is None:  # noqa: ASYNC110 (no event tells it here)
                await asyncio.sleep(_POLL_MS / 1000)
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

    async def close(self) -> None:
        """Ends the core."""
        await asyncio.to_thread(self._handle.end)
        _close(self._context, self._input, self._output)


def _bind(context: zmq.Context[Any], handle: CoreHandle) -> tuple[Any, Any]:
    """Input and output socket, unbounded: the core's admission limits bound what they hold."""
    input_socket, output_socket = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    input_socket.setsockopt(zmq.SNDHWM, 0)
    input_socket.bind(handle.input_address)
    output_socket.setsockopt(zmq.RCVHWM, 0)
    output_socket.bind(handle.output_address)
    return input_socket, output_socket


def _close(context: zmq.Context[Any], *sockets: Any) -> None:
    for socket in sockets:
        socket.close(linger=0)
    with contextlib.suppress(zmq.ZMQError):
        context.term()


def _result(answer: UtilityOutput) -> Any:
    if answer.failure is not None:
        raise UtilityFailed(answer.failure)
    return answer.result


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

"""AsyncMPClient: the asyncio client of an engine core that runs in its own process. See `core_client`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import POLL_MS, addition, bind, close_all, result_of
from argosy_engine.core.proc.core_handle import (
    ALONE,
    STACKS_S,
    AttachedCore,
    ClientGroup,
    CoreHandle,
    LoadWatch,
    dump_stacks,
)
from argosy_engine.core.proc.media_channel import MediaSender
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.errors import EngineDead, UtilityFailed
from argosy_engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.resolved_config import ResolvedConfig

_NOBLOCK = int(zmq.NOBLOCK)


class OutputSocket:
    """The socket by which a client reads the core's messages, in its place in the event loop until `close`.

    zmq.asyncio makes several futures and callbacks for every message, which cost more CPU time than a decode step's
    message takes to decode and deliver. Here messages that have arrived are taken at once, and only a reader that has
    none waits.

    Args:
        socket: a bound PULL socket. It belongs to its owner, who closes it after this.
        exited: is done once the core has ended.
        last_message_s: returns how long the last message of a core that has ended may take to arrive.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], exited: asyncio.Future[None], last_message_s: Callable[[], float]
    ) -> None:
        self._socket = socket
        self._exited = exited
        self._last_message_s = last_message_s
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        # The descriptor is readable when the socket's state may have changed; only a read that finds nothing resets it.
        self._loop.add_reader(socket.FD, self._wake)
        exited.add_done_callback(self._wake)

    async def receive(self) -> bytes | None:
        """Return the next message, in the order of arrival; None once the core has ended and has left none."""
        while (message := self._take()) is None:
            if self._exited.done():
                return await self._last()
            await self._wait()
        return message

    def close(self) -> None:
        """Leave the event loop."""
        self._loop.remove_reader(self._socket.FD)
        self._exited.remove_done_callback(self._wake)

    async def _last(self) -> bytes | None:
        """Wait for the message that the core may have sent before it ended."""
        message = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._last_message_s()):
                while (message := self._take()) is None:
                    await self._wait()
        return message

    def _take(self) -> bytes | None:
        try:
            return self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self, _exited: Any = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As numbers: combining enumeration members takes as long as sending a frame."""
_MOST_UNSENT = 8
"""Frames that wait for each other at most: four requests, so that the first does not wait until many are rendered."""
_LARGE_FRAME = 1 << 16
"""Bytes of a frame from which ZMQ's thread reads them where they are, instead of a copy that the event loop makes."""
_CONNECT_POLL_S = 0.02
"""Interval at which a reply is tried whose core has not connected yet, once at its start."""


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
    """Client of a core in its own process. Create it with `start`, or in a further API process with `attach`."""

    def __init__(self, handle: CoreHandle | AttachedCore, index: int = 0) -> None:
        self._handle = handle
        self._index = index
        self._context: zmq.Context[Any] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._input, self._output = bind(self._context, handle)
        self._media = MediaSender(handle.directory, index)
        self._call_ids: Iterator[int] = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[bytes] = []
        """Frames of messages for the core, a type and a payload each."""
        self._has_ended = asyncio.Event()
        """Set once the outputs are no longer read, so that no call can be answered."""
        self.config: ResolvedConfig

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        rank: int = 0,
        lockstep: LockstepEnds | None = None,
        group: ClientGroup = ALONE,
        watch: LoadWatch | None = None,
    ) -> AsyncMPClient:
        """Start the core process and wait until its model is loaded.

        Args:
            rank: data-parallel rank of the core.
            lockstep: of cores that share experts.
            group: the API processes that the core serves.
            watch: of the loads of several cores.

        Raises:
            ConfigError: the core rejects its arguments; the message is meant for the person who started it.
            LoadStalled: the load did not advance for long.
            EngineDead: the core died while starting.
        """
        if watch is None:
            watch = LoadWatch(args.load_stall_timeout, group.on_load_step)
        handle = CoreHandle(args, rank, lockstep, group.size, watch)
        client = cls(handle)
        try:
            handle.start()  # fork and exec take milliseconds, once
            group.on_core_started(rank, handle.directory)
            await client._wait_until_ready()
        except BaseException:
            await client.close()
            raise
        return client

    @classmethod
    async def attach(cls, directory: Path, index: int) -> AsyncMPClient:
        """Connect to a core that another API process has started, and wait until its model is loaded.

        Args:
            directory: of the core's sockets (`ClientGroup.on_core_started`).
            index: this API process, from 1.

        Raises:
            ConfigError, EngineDead: as `start`.
        """
        client = cls(AttachedCore(directory, index), index)
        try:
            await client._wait_until_ready()
        except BaseException:
            await client.close()
            raise
        return client

    async def _wait_until_ready(self) -> None:
        shaking, watch = asyncio.ensure_future(self._shake_hands()), self._handle.watch
        try:
            while not (await asyncio.wait({shaking}, timeout=watch.remaining_s if watch else None))[0]:
                if watch is not None and watch.is_stalled:
                    dump_stacks([self.pid])
                    await asyncio.wait({shaking}, timeout=STACKS_S)
                    raise watch.stalled()
            self.config = shaking.result()
            self._media.connect()
        finally:
            shaking.cancel()
            await asyncio.gather(shaking, return_exceptions=True)

    async def _shake_hands(self) -> ResolvedConfig:
        exited = asyncio.ensure_future(self._exit())
        messages = self._messages(exited)
        try:
            while self._handle.config is None:
                message = await messages.receive()
                if message is None:
                    raise self._handle.dead(" while starting")
                reply = self._handle.greeting(message)
                if reply is not None and not await self._reply(reply, exited):
                    raise self._handle.dead(" while starting")
        finally:
            messages.close()
            exited.cancel()
        return self._handle.config

    async def _reply(self, reply: list[bytes], exited: asyncio.Future[None]) -> bool:
        """Answer a core that is starting; return False if it ended before it had connected to its input."""
        while not exited.done():
            try:
                self._input.send_multipart(reply, zmq.NOBLOCK)
                return True
            except zmq.Again:
                await asyncio.wait({exited}, timeout=_CONNECT_POLL_S)
        return False

    def _messages(self, exited: asyncio.Future[None]) -> OutputSocket:
        return OutputSocket(self._output, exited, lambda: self._handle.last_message_ms / 1000)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core. Raises EngineDead if the core has died."""
        request.client_index = self._index
        await self._send(addition(self._encoder, request, self._media))

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
            call = UtilityCall(call_id, method, list(args), self._index)
            await self._send([RequestType.UTILITY, self._encoder.encode(call)])
            return await future
        finally:
            del self._calls[call_id]

    async def outputs(self) -> AsyncGenerator[EngineCoreOutputs]:
        """Yield everything that the core sends, until it dies.

        Raises:
            EngineDead: the process ended, or announced that it is dying.
        """
        exited = asyncio.ensure_future(self._exit())
        messages = self._messages(exited)
        try:
            while (message := await messages.receive()) is not None:
                outputs = self._decoder.decode(message)
                if outputs.dead is not None:
                    self._handle.reason = outputs.dead
                    raise self._handle.dead()
                if outputs.utility is not None:
                    self._resolve(outputs.utility)
                yield outputs
            raise self._handle.dead()
        finally:
            messages.close()
            exited.cancel()
            self._has_ended.set()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(self._gone())

    async def _send(self, message: list[bytes]) -> None:
        """Send a message without blocking, together with others that come in the same turn of the event loop."""
        if self._handle.poll() is not None:
            await self._await_reason()
            raise self._handle.dead()
        if self._has_ended.is_set():
            raise self._gone()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += message
        if len(self._unsent) >= _MOST_UNSENT:
            self._flush()

    def _flush(self) -> None:
        """Send what is not sent yet as one message: each of them would wake ZMQ's thread, and the core's.

        The queue has no limit, so only a dead core cannot take it, and the end of the outputs tells that to everyone.
        """
        frames, self._unsent = self._unsent, []
        if not frames:
            return
        with contextlib.suppress(zmq.Again):
            for frame in frames[:-1]:
                self._input.send(frame, _NOBLOCK_MORE, copy=len(frame) < _LARGE_FRAME)
            self._input.send(frames[-1], _NOBLOCK)

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
        """End the core, if this client has started it, and close the sockets, even if the caller is cancelled."""
        ending = asyncio.ensure_future(asyncio.to_thread(self._handle.end))
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        self._media.close()
        close_all(self._context, self._input, self._output)
        ending.result()
        if cancelled is not None:
            raise cancelled


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

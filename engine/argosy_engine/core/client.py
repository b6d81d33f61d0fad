"""Clients of the engine core: in the same process, or over ZMQ to a process of its own.

Both speak the same messages. The client owns the core's life: when it closes (or dies), the core ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.core.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Failed,
    Handshake,
    HandshakeMessage,
    Hello,
    Ready,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.errors import ConfigError, EngineDead

START_TIMEOUT_S = 1800.0
"""Loading a large model from a slow disk takes its time; a core that dies is noticed at once, not by this."""


class InprocClient:
    """The core as an object of this process: for offline use and tests."""

    def __init__(self, args: EngineArgs) -> None:
        from argosy_engine.core.engine_core import EngineCore
        from argosy_engine.executor.uniproc import UniprocExecutor

        self.core = EngineCore(args, UniprocExecutor(args))
        self.config: ResolvedConfig = self.core.config

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(request_ids)

    def step(self) -> EngineCoreOutputs:
        return self.core.step()

    def close(self) -> None:
        self.core.shutdown()


class AsyncMPClient:
    """The core in a process of its own. Create it with `start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], directory: Path, context: zmq.asyncio.Context
    ) -> None:
        self._process = process
        self._directory = directory
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._input = context.socket(zmq.PUSH)
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._input.bind(f"ipc://{directory}/input")
        self._output = context.socket(zmq.PULL)
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._output.bind(f"ipc://{directory}/output")
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
        directory = Path(tempfile.mkdtemp(prefix="argosy-"))  # mode 0700
        context = zmq.asyncio.Context()
        handshake = context.socket(zmq.ROUTER)
        handshake.setsockopt(zmq.LINGER, 0)
        handshake.bind(f"ipc://{directory}/handshake")
        process = subprocess.Popen(  # noqa: S603, ASYNC220 (fork and exec take milliseconds, once)
            [sys.executable, "-m", "argosy_engine.core.process", f"ipc://{directory}/handshake"],
            stdin=subprocess.PIPE,
            start_new_session=False,
        )
        client = cls(process, directory, context)
        try:
            client.config = await asyncio.wait_for(client._shake_hands(handshake, args), START_TIMEOUT_S)
        except BaseException:
            handshake.close()
            await client.close()
            raise
        handshake.close()
        return client

    async def _shake_hands(self, handshake: zmq.asyncio.Socket, args: EngineArgs) -> ResolvedConfig:
        identity, hello = await self._handshake_message(handshake)
        if not isinstance(hello, Hello):
            raise EngineDead(f"the engine core started with {type(hello).__name__}")
        reply = Handshake(f"ipc://{self._directory}/input", f"ipc://{self._directory}/output", args)
        await handshake.send_multipart([identity, self._encoder.encode(reply)])
        _, answer = await self._handshake_message(handshake)
        if isinstance(answer, Failed):
            raise ConfigError(answer.message) if answer.is_config_error else EngineDead(answer.message)
        if not isinstance(answer, Ready):
            raise EngineDead(f"the engine core answered with {type(answer).__name__}")
        return answer.config

    async def _handshake_message(self, handshake: zmq.asyncio.Socket) -> tuple[bytes, HandshakeMessage]:
        """The next message, or EngineDead as soon as the process has ended without one."""
        while not await handshake.poll(200):
            code = self._process.poll()
            if code is not None and not await handshake.poll(0):
                raise EngineDead(f"the engine core process ended while starting (exit code {code})")
        identity, payload = await handshake.recv_multipart()
        return identity, msgspec.msgpack.decode(payload, type=HandshakeMessage)

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._input.send_multipart([RequestType.ADD, self._encoder.encode(request)])

    async def abort_requests(self, request_ids: list[str]) -> None:
        await self._input.send_multipart([RequestType.ABORT, self._encoder.encode(request_ids)])

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a utility of the core and waits for its result.

        Raises:
            EngineDead: the core died, or the utility failed.
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
        exited = asyncio.ensure_future(self._wait_for_exit())
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
                    raise EngineDead(f"the engine core process ended (exit code {exited.result()})")
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
        if answer.failure is not None:
            future.set_exception(EngineDead(answer.failure))
        else:
            future.set_result(answer.result)

    async def _wait_for_exit(self) -> int:
        """Exit code of the core, noticed by a pidfd: an event, no polling."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, _set_done, ended)
        try:
            await ended
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def close(self) -> None:
        """Ends the core and removes the socket directory."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # the core exits on end of file
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._input.close(linger=0)
        self._output.close(linger=0)
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

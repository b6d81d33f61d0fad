"""MediaPool: runs jobs of images in forks of the media server (`worker`), bounded in processes, time and bytes.

Threads wait for the forks, one each, so that as many run at once as there are threads. Tenants take turns in the
bounded queue (`admission.BoundedThreads`). A fork is killed when its client leaves, and when it takes too long; a
server that does not fork in time, or has ended, is replaced, and the job tried again once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from typing import Any, Final

import msgspec

from argosy_engine.core.proc.media_channel import MAX_FILES, MediaFile, NotPassed, file_size
from argosy_engine.errors import ConfigError, InvalidRequest, RequestFailed, ResourceBusy
from argosy_engine.fair_shares import TenantShares
from argosy_engine.frontend.admission import BoundedThreads
from argosy_engine.frontend.media.worker import (
    DONE,
    FAULT,
    REFUSED,
    ImageJob,
    ImageResult,
    ProcessorArgs,
    ProcessorInfo,
)
from argosy_engine.osproc import ForkedJob, SpawnerThread, framed, start_fork_server

logger = logging.getLogger("argosy.frontend")

JOB_TIMEOUT_S: Final = 20.0
"""For one image, from its fork. The largest take three seconds; on a busy machine, several times as long."""
FORK_TIMEOUT_S: Final = 5.0
_END_S: Final = 0.05
START_TIMEOUT_S: Final = 120.0
"""For the start of the server: it imports transformers, reads the tokenizer, and tries the processor."""
MAX_JOBS: Final = 256
"""Images that wait or run in one API process."""
MAX_WAITING_BYTES: Final = 512 << 20
"""Of the images that wait or run, as they were sent."""
MAX_PROCESSES: Final = 8
_MAX_ANSWER_BYTES: Final = 300 << 20
RETRY_S: Final = 1.0


class NoProcessor(Exception):
    """The model's images cannot be processed; the message says why."""


class _ServerLost(Exception):
    """The media server, or the fork, ended before it answered."""


class _Server:
    """A media server, from its start to its end. `info` is set once it is ready.

    Raises (from the constructor):
        OSError: the process cannot be started.
    """

    def __init__(self, args: ProcessorArgs) -> None:
        self._process, self._control = start_fork_server(
            "argosy_engine.frontend.media.worker", TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1"
        )
        self._args = args

    @property
    def pid(self) -> int:
        return self._process.pid

    def info(self, timeout_s: float) -> ProcessorInfo:
        """Wait until the server is ready.

        Raises:
            NoProcessor: it has told why it cannot be.
            ConfigError: `--mm-processor-kwargs` has what the processor does not take.
            OSError, EOFError: it has ended, or is not ready in time.
        """
        self._control.settimeout(timeout_s)
        self._control.sendall(framed(msgspec.msgpack.encode(self._args)))
        kind, data, _ = _receive_answer(self._control, time.monotonic() + timeout_s)
        if kind == REFUSED:
            raise NoProcessor(msgspec.msgpack.decode(data, type=str))
        if kind == FAULT:
            raise ConfigError(f"--mm-processor-kwargs: {msgspec.msgpack.decode(data, type=str)}")
        return msgspec.msgpack.decode(data, type=ProcessorInfo)

    def connect(self) -> ForkedJob:
        """Send the server the socket of a new job, and return our end. Raises OSError if it has ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._control.settimeout(FORK_TIMEOUT_S)
                socket.send_fds(self._control, [b"J"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ForkedJob(ours)

    def has_ended(self) -> bool:
        """Whether the process has ended, and its forks with it, whose ends may be seen first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return self._process.returncode is not None

    def kill(self) -> None:
        """Kill the process; the kernel then kills its forks."""
        self._control.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FORK_TIMEOUT_S)


class MediaPool:
    """
    Args:
        num_processes: images that are processed at the same time.
        job_timeout_s: for one image.
    """

    def __init__(
        self, args: ProcessorArgs, num_processes: int, *, job_timeout_s: float = JOB_TIMEOUT_S
    ) -> None:
        self._args = args
        self._job_timeout_s = job_timeout_s
        self._threads = BoundedThreads("images", num_processes, MAX_JOBS, done="decoded")
        self._lock = threading.Lock()
        self._spawner = SpawnerThread("media server starter")
        self._server: _Server | None = None
        self._info: ProcessorInfo | None = None
        self._fault: str | None = None
        self._waiting = TenantShares(MAX_WAITING_BYTES)
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The server's; None if none runs."""
        server = self._server
        return None if server is None else server.pid

    def info(self) -> ProcessorInfo:
        """Start the server if it does not run; return what its processor says. Blocks until it is ready.

        Raises:
            NoProcessor: the model's images cannot be processed.
            ConfigError: `--mm-processor-kwargs` has what its processor does not take.
        """
        if self._info is None:
            with self._lock:
                try:
                    self._running()
                except (OSError, EOFError) as error:
                    raise NoProcessor(f"the process for images does not start: {error}") from None
        assert self._info is not None
        return self._info

    async def run(self, job: ImageJob, data: bytes, where: str, tenant: str = "") -> ImageResult:
        """Process an image.

        Args:
            where: the field that has it, for errors.

        Raises:
            InvalidRequest: the image cannot be processed within the limits.
            RequestFailed: the server cannot be started again.
            ResourceBusy: too many images wait, in all or of this tenant.
        """
        waiting, size = self._waiting, len(data)
        if not waiting.takes(tenant, size):
            raise ResourceBusy(
                f"images of {waiting.total >> 20} MiB are waiting, {waiting.held_by(tenant) >> 20} of them of the same "
                "key",
                retry_after_s=RETRY_S,
            )
        running = _Running()
        waiting.add(tenant, size)
        try:
            return await self._threads.run(lambda _: self._process(job, data, where, running), job, tenant)
        finally:
            waiting.remove(tenant, size)
            running.cancel()

    def close(self) -> None:
        """End the server and all jobs."""
        self._threads.close()
        with self._lock:
            self._is_closed = True
            if self._server is not None:
                self._server.kill()
            self._server = None
            self._spawner.close()

    def _process(self, asked: ImageJob, data: bytes, where: str, running: _Running) -> ImageResult:
        for is_last in (False, True):
            try:
                return self._attempt(asked, data, where, running)
            except _ServerLost as error:
                if is_last:
                    raise RequestFailed(f"an image could not be processed: {error}") from None
        raise AssertionError

    def _attempt(self, asked: ImageJob, data: bytes, where: str, running: _Running) -> ImageResult:
        server, job = self._connect()
        try:
            running.set(job)
            try:
                job.await_fork(FORK_TIMEOUT_S)
            except (OSError, EOFError):
                if not running.is_cancelled:
                    self._drop(server)
                raise _ServerLost("the process for images does not answer") from None
            deadline = time.monotonic() + self._job_timeout_s
            try:
                question = msgspec.structs.replace(asked, deadline_s=self._job_timeout_s)
                job.socket.settimeout(self._job_timeout_s)
                job.socket.sendall(framed(msgspec.msgpack.encode(question)))
                job.socket.sendall(data)
                kind, answer, descriptors = _receive_answer(job.socket, deadline)
            except TimeoutError:
                raise _too_long(where, self._job_timeout_s) from None
            except (OSError, EOFError):
                if time.monotonic() >= deadline - 1:  # the kernel's timer may be first
                    raise _too_long(where, self._job_timeout_s) from None
                if not running.is_cancelled and server.has_ended():
                    raise _ServerLost("the process for images ended") from None
                raise InvalidRequest(
                    f"{where}: the image ended the process that decodes it; it is damaged, or too large",
                    param=where,
                ) from None
        finally:
            job.close()
        if kind == DONE:
            return _mapped(msgspec.msgpack.decode(answer, type=ImageResult), descriptors)
        told = msgspec.msgpack.decode(answer, type=str)
        if kind == FAULT:
            raise _ServerLost(told)
        raise InvalidRequest(f"{where}: the image {told}", param=where)

    def _connect(self) -> tuple[_Server, ForkedJob]:
        """
        Raises:
            _ServerLost: no server can be started.
        """
        with self._lock:
            for _ in range(2):
                try:
                    server = self._running()
                    return server, server.connect()
                except (OSError, EOFError, NoProcessor, ConfigError):
                    self._end()
        raise _ServerLost("the process for images does not start")

    def _running(self) -> _Server:
        """Return the server, started if there is none. Needs the lock."""
        if self._is_closed:
            raise OSError("the engine is shutting down")
        if self._server is None:
            server = self._spawner.call(lambda: _Server(self._args))
            try:
                self._info = server.info(START_TIMEOUT_S)
            except BaseException:
                server.kill()
                raise
            self._server = server
        return self._server

    def _drop(self, server: _Server) -> None:
        with self._lock:
            if self._server is server:
                logger.error(
                    "process %d, which processes images, does not answer and is replaced", server.pid
                )
                self._end()

    def _end(self) -> None:
        if self._server is not None:
            self._server.kill()
        self._server = None


class _Running:
    """The job that works for a caller, who may leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: ForkedJob | None = None
        self.is_cancelled = False

    def set(self, job: ForkedJob) -> None:
        with self._lock:
            self._job = job
            if self.is_cancelled:
                job.kill()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._job is not None:
                self._job.kill()


def _too_long(where: str, seconds: float) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: the image was not decoded within {seconds:g} s; send a smaller one", param=where
    )


def _mapped(result: ImageResult, descriptors: list[int]) -> ImageResult:
    """Return a result with its tensors, which may be in a file.

    Raises:
        _ServerLost: it cannot be mapped.
    """
    if not descriptors:
        return result
    try:
        inputs = MediaFile.of(descriptors[0], file_size(result.inputs)).tensors(result.inputs)
    except NotPassed as error:
        raise _ServerLost(str(error)) from None
    if MediaFile.num_open > MAX_FILES:  # a process has a limit of open files
        inputs = {name: msgspec.structs.replace(each, data=bytes(each.data)) for name, each in inputs.items()}
    return msgspec.structs.replace(result, inputs=inputs)


def _receive_answer(connection: socket.socket, deadline: float) -> tuple[bytes, Any, list[int]]:
    """Receive a kind of answer, the answer, and the descriptor that comes with it, if any.

    Raises:
        TimeoutError: not in time.
        EOFError: the other end is closed.
        OSError: the connection is lost.
    """
    connection.settimeout(max(deadline - time.monotonic(), _END_S))
    kind, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if not kind:
            raise EOFError
        size = int.from_bytes(_receive(connection, 4, deadline), "little")
        if size > _MAX_ANSWER_BYTES:
            raise EOFError
        return kind, _receive(connection, size, deadline), descriptors
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise


def _receive(connection: socket.socket, size: int, deadline: float) -> bytearray:
    received = bytearray(size)
    view = memoryview(received)
    done = 0
    while done < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return received

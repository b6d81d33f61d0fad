"""Blocking clients of the engine core: in the same process, over ZMQ to a process of its own, or without a core.

All clients exchange the same messages with the same `EngineCore`. That of the API server is in `async_core_client`,
those of several cores are in `data_parallel_client`.

InprocClient      direct calls, for offline use and tests
CopiedCoreClient  the same, of a core that has copies in other processes
ClosedClient      stands in for a client that its owner has closed
SyncMPClient      for offline use with the core in its own process

A client owns the core's lifetime: when it closes or dies, the core ends. When the core dies, every call raises
`EngineDead` instead of waiting, except for aborts, which then have no effect.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec
import zmq

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_handle import STACKS_S, AttachedCore, CoreHandle, LoadWatch, dump_stacks
from argosy_engine.core.proc.media_channel import MediaSender, detach_tensors
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.errors import EngineClosed, EngineDead, UtilityFailed
from argosy_engine.executor.abstract import Executor
from argosy_engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.resolved_config import ResolvedConfig

POLL_MS = 200
"""Interval at which a client checks that the core is alive, where the system has no pidfd."""

WAIT_S = 0.5
"""How long a core in the caller's process waits for a grammar before it checks deadlines again."""

CHECK_INTERVAL_S = 1.0
"""Minimum interval between two checks of the invariants in the caller's process. Such a core is idle after every call,
and with many blocks a check takes milliseconds."""


def addition(
    encoder: msgspec.msgpack.Encoder, request: EngineCoreRequest, sender: MediaSender | None = None
) -> list[bytes]:
    """Return the frames that add a request: pairs of a type and what it stands before.

    Args:
        sender: passes the images that are in files.
    """
    if not request.mm_features:
        return [RequestType.ADD, encoder.encode(request)]
    features = request.mm_features
    request.mm_features, frames = detach_tensors(features, sender)
    try:
        payload = encoder.encode(request)
    finally:
        request.mm_features = features
    return [*frames, RequestType.ADD, payload]


class SyncClient(Protocol):
    """Interface that `LLM` and `LLMEngine` need from a client."""

    config: ResolvedConfig

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def step(self) -> EngineCoreOutputs:
        """Return the outputs of the core's next step. Call it only while `has_work`."""
        ...

    def call_utility(self, method: str, *args: Any) -> Any: ...

    def close(self) -> None: ...


class InprocClient:
    """Client that holds the core as an object in its own process.

    Args:
        executor: default: the one that the arguments select.
    """

    def __init__(self, args: EngineArgs, executor: Executor | None = None) -> None:
        from argosy_engine.core.engine_core import EngineCore
        from argosy_engine.executor.factory import make_executor

        self._next_check = 0.0
        self.core = EngineCore(args, executor or make_executor(args))
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
            self.core.structured.wait(WAIT_S)
        self.core.tick()
        try:
            outputs = self.core.step()
        except Exception:
            from argosy_engine.core.state_dump import log_dump

            log_dump(self.core)
            raise
        if not self.core.has_work and time.monotonic() >= self._next_check:
            self.core.check_when_idle()
            self._next_check = time.monotonic() + CHECK_INTERVAL_S
        return outputs

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility. Raises UtilityFailed if the core has no such utility, or it failed."""
        return result_of(self.core.call_utility(UtilityCall(0, method, list(args))))

    def close(self) -> None:
        self.core.shutdown()


class ClosedClient:
    """Client of a closed engine: it has no work and ignores aborts; everything else raises EngineClosed."""

    has_work = False

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config

    def add_request(self, request: EngineCoreRequest) -> None:
        raise self._closed()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        pass

    def step(self) -> EngineCoreOutputs:
        raise self._closed()

    def call_utility(self, method: str, *args: Any) -> Any:
        raise self._closed()

    def close(self) -> None:
        pass

    def _closed(self) -> EngineClosed:
        return EngineClosed("the engine is closed; make a new LLM or LLMEngine, or close it later")


class SyncMPClient:
    """Blocking client of a core in its own process.

    Args:
        rank: data-parallel rank of the core.
        lockstep: of cores that share experts.
        is_awaited: wait until the core is ready; otherwise only start it, and leave `shake_hands` to the caller.
        watch: of the loads of several cores.

    Raises (from the constructor, or the methods that wait):
        ConfigError: the core rejects its arguments; the message is meant for the person who started it.
        LoadStalled: the load did not advance for long.
        EngineDead: the core died while starting. The methods raise it if the core dies later.
    """

    def __init__(
        self,
        args: EngineArgs,
        rank: int = 0,
        lockstep: LockstepEnds | None = None,
        *,
        is_awaited: bool = True,
        watch: LoadWatch | None = None,
    ) -> None:
        self._handle = CoreHandle(args, rank, lockstep, watch=watch)
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._call_ids: Iterator[int] = itertools.count()
        self._unfinished: set[str] = set()
        self._pending: deque[EngineCoreOutputs] = deque()
        self._input, self._output = bind(self._context, self._handle)
        self._media = MediaSender(self._handle.directory)
        self.config: ResolvedConfig
        try:
            self._handle.start()
            if is_awaited:
                self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        while not self.shake_hands():
            pass

    def shake_hands(self) -> bool:
        """Wait for the next message of the start and answer it. Returns whether the model is loaded."""
        reply = self._handle.greeting(self._receive(self._handle.watch, " while starting"))
        if reply is not None:
            self._send(reply, self._handle.watch, " while starting")
        if self._handle.config is not None:
            self.config = self._handle.config
            self._media.connect()
        return self._handle.config is not None

    def check_start(self) -> None:
        """Raise LoadStalled if the load has not advanced for long."""
        if self._handle.watch.is_stalled:
            dump_stacks([self.pid])
            time.sleep(STACKS_S)
            raise self._handle.watch.stalled()

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(addition(self._encoder, request, self._media))
        self._unfinished.add(request.request_id)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        aborted = list(request_ids)
        self._unfinished.difference_update(aborted)
        with contextlib.suppress(EngineDead):
            self._send([RequestType.ABORT, self._encoder.encode(aborted)])

    @property
    def is_ready(self) -> bool:
        """Whether `step` has something to return, or to raise, at once."""
        return bool(self._pending or self._output.poll(0) or self._handle.poll() is not None)

    def watch(self, poller: zmq.Poller) -> bool:
        """Have a poller wait until `is_ready`; returns whether it will notice the core's end, too."""
        poller.register(self._output, zmq.POLLIN)
        if self._handle.pidfd is not None:
            poller.register(self._handle.pidfd, zmq.POLLIN)
        return self._handle.pidfd is not None

    def step(self) -> EngineCoreOutputs:
        outputs = self._pending.popleft() if self._pending else self._next()
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
        return outputs

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a utility and wait. Raises UtilityFailed if the core has no such utility, or it failed."""
        return self.answer(self.begin_call(method, *args))

    def begin_call(self, method: str, *args: Any) -> int:
        """Send a call of a utility, and return the number with which to get its `answer`."""
        call_id = next(self._call_ids)
        call = UtilityCall(call_id, method, list(args))
        self._send([RequestType.UTILITY, self._encoder.encode(call)])
        return call_id

    def answer(self, call_id: int) -> Any:
        """Wait for the answer to a call, in the order of the calls. Raises like `call_utility`."""
        while True:
            outputs = self._next()
            if outputs.outputs or outputs.residency is not None:
                self._pending.append(outputs)
            if outputs.utility is not None and outputs.utility.call_id == call_id:
                return result_of(outputs.utility)

    def close(self) -> None:
        self._handle.end()
        self._media.close()
        close_all(self._context, self._input, self._output)

    def _next(self) -> EngineCoreOutputs:
        outputs = self._decoder.decode(self._receive(None))
        if outputs.dead is not None:
            self._handle.reason = outputs.dead
            raise self._handle.dead()
        return outputs

    def _send(self, message: list[bytes], watch: LoadWatch | None = None, doing: str = "") -> None:
        """Send a message. Raises EngineDead if the core has ended."""
        if self._handle.reason or self._handle.poll() is not None:
            raise self._dead(doing)
        self._wait(self._input, zmq.POLLOUT, watch, doing)
        try:
            self._input.send_multipart(message, zmq.NOBLOCK, copy=len(message) == 2)
        except zmq.Again:  # it has ended since
            raise self._dead(doing) from None

    def _dead(self, doing: str) -> EngineDead:
        """Return the error of a core that has ended, with the reason that its last message tells. What it sent before
        is left to `step`."""
        while not self._handle.reason and self._handle.config is not None:
            if not self._output.poll(self._handle.last_message_ms):
                break
            outputs = self._decoder.decode(self._output.recv())
            if outputs.dead is not None:
                self._handle.reason = outputs.dead
            else:
                self._pending.append(outputs)
        return self._handle.dead(doing)

    def _receive(self, watch: LoadWatch | None, doing: str = "") -> bytes:
        """Wait for the core's next message. Raises EngineDead as soon as the core has ended without one."""
        self._wait(self._output, zmq.POLLIN, watch, doing)
        return bytes(self._output.recv())

    def _wait(self, socket: Any, event: int, watch: LoadWatch | None, doing: str) -> None:
        """Wait until the socket is ready.

        Raises:
            EngineDead: the core ended before that.
            LoadStalled: the load that is watched has stalled.
        """
        poller = zmq.Poller()
        poller.register(socket, event)
        if self._handle.pidfd is not None:
            poller.register(self._handle.pidfd, zmq.POLLIN)
        while not socket.poll(0, event):
            if self._handle.poll() is not None and not (
                event == zmq.POLLIN and socket.poll(self._handle.last_message_ms)
            ):
                raise self._handle.dead(doing) if event == zmq.POLLIN else self._dead(doing)
            if watch is not None:
                self.check_start()
            poller.poll(POLL_MS if self._handle.pidfd is None or watch is not None else None)


def bind(context: zmq.Context[Any], handle: CoreHandle | AttachedCore) -> tuple[Any, Any]:
    """Bind the core's input and output socket. They have no limit, since queue limits bound what they can hold."""
    input_socket, output_socket = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    input_socket.setsockopt(zmq.SNDHWM, 0)
    input_socket.bind(handle.input_address)
    output_socket.setsockopt(zmq.RCVHWM, 0)
    output_socket.bind(handle.output_address)
    return input_socket, output_socket


def close_all(context: zmq.Context[Any], *sockets: Any) -> None:
    for socket in sockets:
        socket.close(linger=0)
    with contextlib.suppress(zmq.ZMQError):
        context.term()


def result_of(answer: UtilityOutput) -> Any:
    if answer.failure is not None:
        raise UtilityFailed(answer.failure)
    return answer.result


class CopiedCoreClient(InprocClient):
    """Client of a core in this process of which a launcher has started copies in other processes.

    The copies take the same decisions because they are given the same calls. What else a core decides by is made the
    same here: nothing depends on time, and the first copy alone compiles and follows grammars (`CopiedGrammars`).

    Raises (from the constructor):
        ConfigError: the model or an argument cannot work, or no launcher has started as many processes as needed.
        EngineDead: another copy cannot start. Every call raises it once a copy has ended.
    """

    def __init__(self, args: EngineArgs) -> None:
        from argosy_engine.core.engine_core import Watchdog
        from argosy_engine.executor.external_launcher_executor import ExternalLauncherExecutor
        from argosy_engine.structured.manager import CopiedGrammars, StructuredOutputManager

        executor = ExternalLauncherExecutor(args)
        super().__init__(args, executor)
        core, copies = self.core, executor.copies
        core.watchdog = Watchdog(0.0, clock=lambda: 0.0)  # never due
        if copies.size > 1:
            assert isinstance(core.structured, StructuredOutputManager)
            core.structured = CopiedGrammars(core.structured, executor.announce, is_leader=copies.rank == 0)

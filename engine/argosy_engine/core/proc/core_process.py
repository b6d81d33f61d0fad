"""CoreProcess: the process of the engine core.

Its command line is `python -m argosy_engine.core.proc.core_process NAME DIRECTORY PARENT CLIENTS`.

It has three threads: input (decodes the client's messages and hashes their prompts), the busy loop (owns the core), and
output (encodes and sends). The process lives exactly as long as its client: standard input is a pipe from the client,
end of file means exit, and the kernel kills a core that cannot even read it. The ipc sockets are in the client's
private directory, which is deleted once all are connected; messages are typed msgpack.

There may be several API processes, each with a client of its own, of which the first has started the core (the others
have an `AttachedCore`). All send to one input socket; each has an output socket of its own (`OutputRouter`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import zmq
from msgspec import structs

from argosy_engine.core.proc.core_handle import LoadWatch, client_addresses
from argosy_engine.core.proc.media_channel import MediaReceiver, NotPassed, PassedFile, attach_tensors
from argosy_engine.core.proc.output_router import HeldOutputs, OutputRouter
from argosy_engine.core.request import Request
from argosy_engine.distributed.lockstep import Lockstep
from argosy_engine.distributed.parallel_config import name_process, process_name
from argosy_engine.errors import ConfigError, EngineBusy, EngineDead, ResourceBusy
from argosy_engine.messages import (
    Advanced,
    Attached,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    Failed,
    FinishReason,
    Handshake,
    HandshakeMessage,
    Hello,
    LatestStep,
    Loading,
    Ready,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from argosy_engine.osproc import describe_on_signal, die_with_parent, dump_stacks_on_signal
from argosy_engine.params import SamplingParams
from argosy_engine.sizing.kv_cache_sizing import check_model
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from argosy_protocol.program.process import configure_logging

logger = logging.getLogger("argosy.core")

_LARGE = ("allowed_token_ids", "logit_bias", "bad_words_token_ids", "extra_args")


class CallParameters:
    """Remembers the parameters of each call's latest sequence for as long as the core holds them.

    Every sequence of a call arrives as a message of its own, so that a list of a hundred thousand allowed tokens would
    be held once for each of a call's thousand sequences. Values are compared, not trusted to be equal. One thread uses
    it.
    """

    def __init__(self) -> None:
        self._params: WeakValueDictionary[str, SamplingParams] = WeakValueDictionary()
        self._specs: WeakValueDictionary[str, GrammarSpec] = WeakValueDictionary()

    def share(self, message: EngineCoreRequest) -> None:
        """Replace what is equal to the call's latest sequence by the objects of that one."""
        call_id = message.call_id
        if not call_id:
            return
        params, earlier = message.sampling_params, self._params.get(call_id)
        if earlier is not None:
            for name in _LARGE:
                value = getattr(earlier, name)
                if value == getattr(params, name):
                    setattr(params, name, value)
        self._params[call_id] = params
        if message.grammar is None:
            return
        spec = self._specs.get(call_id)
        if spec == message.grammar.spec:
            message.grammar = structs.replace(message.grammar, spec=spec)
        self._specs[call_id] = message.grammar.spec


IDLE_HEARTBEAT_S = 0.5
_PROGRESS_S = 0.5
"""Interval at which clients are told how far the load is."""
_LOADS_WEIGHTS = frozenset({"wake_up"})
"""Utilities that may take as long as a start; heartbeats continue while they run."""
_LINGER_MS = 4000
"""Time to deliver the last message, which tells why the core died."""


class _OnlyId(msgspec.Struct, array_like=True):
    """The first field of an `EngineCoreRequest`, which can be decoded even if the rest is malformed."""

    request_id: str


class _Addition(NamedTuple):
    """A new request, preprocessed by the input thread."""

    message: EngineCoreRequest
    request: Request


_Input = _Addition | list[str] | UtilityCall | None
"""A decoded message of the client: a request, ids to abort, or a utility call. None only wakes the loop."""


class CoreProcess:
    """Process that runs an engine core for its clients.

    Args:
        directory: directory in which each client binds its sockets.
        parent: see `osproc.parent_argument`.
        context: owner of this process's end of the input socket.
        output_context: owner of the output sockets. Before the process ends it must be destroyed, which waits until the
            last message, which tells the reason, is delivered.
        num_clients: number of API processes.
    """

    def __init__(
        self,
        directory: Path,
        parent: int,
        context: zmq.Context[Any],
        output_context: zmq.Context[Any],
        num_clients: int = 1,
    ) -> None:
        self._parent = parent
        self._outputs = []
        self._input = context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        for client in range(num_clients):
            input_address, output_address = client_addresses(directory, client)
            output = output_context.socket(zmq.PUSH)
            output.setsockopt(zmq.LINGER, _LINGER_MS)
            output.setsockopt(zmq.SNDHWM, 0)
            output.connect(output_address)
            self._outputs.append(output)
            self._input.connect(input_address)
        self._router = OutputRouter(num_clients)
        self._held_outputs = HeldOutputs(num_clients)
        self._input_queue: queue.SimpleQueue[_Input] = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()
        """Messages to the clients; None ends the output thread."""
        self._lockstep: Lockstep | None = None
        self._add_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._tensors: list[Any] = []
        """Tensors and files of the request whose message comes next."""
        self._directory = directory
        self._media: MediaReceiver | None = None
        self._call_parameters = CallParameters()
        self._abort_decoder = msgspec.msgpack.Decoder(list[str])
        self._utility_decoder = msgspec.msgpack.Decoder(UtilityCall)
        self._load = LatestStep()
        self._load_stall_timeout = 0.0
        self._turned_at = self._received_at = self._sent_at = time.monotonic()

    def run(self) -> int:
        """Start the core, serve until it fails, and report why it ended.

        Returns the exit code: 2 for a configuration error, 1 for any other failure.
        """
        init = self._shake_hands()
        self._load_stall_timeout = init.engine_args.load_stall_timeout
        self._router = OutputRouter(len(self._outputs), balances=init.engine_args.data_parallel_size > 1)
        # Only now: before, a core that outlives its client must still remove the sockets' files.
        die_with_parent(self._parent)
        started = time.perf_counter()
        try:
            check_model(init.engine_args)
            from argosy_engine.core.engine_core import EngineCore
            from argosy_engine.core.state_dump import log_dump
            from argosy_engine.executor.factory import make_executor

            # Imports torch, unless the workers have their own processes.
            executor = make_executor(init.engine_args, init.lockstep, self._load.note)
            gc.freeze()  # the load allocates much, and each collection would look through torch
            imported = time.perf_counter() - started
            if init.lockstep is not None:
                self._lockstep = Lockstep(init.lockstep, IDLE_HEARTBEAT_S)
            with self._telling_progress():
                self.core = EngineCore(init.engine_args, executor, self._lockstep)
        except ConfigError as error:
            self._send_handshake(Failed(str(error), True))
            return 2
        except EngineDead as error:
            self._send_handshake(Failed(str(error), False))
            return 1
        except Exception as error:
            logger.exception("the engine core could not start")
            self._send_handshake(Failed(f"{type(error).__name__}: {error}", False))
            return 1
        self.core.structured.wake = lambda: self._put(None)
        if self._lockstep is not None:
            self._lockstep.on_wait = self._wait_for_ranks
        config = self.core.config
        phases = (("import torch" if "torch" in sys.modules else "imports", imported), *config.startup_phases)
        # Most objects of the start live as long as the process: exclude them from later garbage collections.
        gc.collect()
        gc.freeze()
        describe_on_signal(f"argosy engine {process_name() or 'core'}", self._describe)
        self._send_handshake(Ready(msgspec.structs.replace(config, startup_phases=phases)))
        threading.Thread(target=self.process_input_socket, daemon=True, name="input").start()
        sender = threading.Thread(target=self.process_output_socket, name="output")
        sender.start()
        code = 0
        try:
            self._busy_loop()
        except EngineDead as error:  # the executor has logged why
            if self.core.has_work:
                log_dump(self.core)
            self.output_queue.put(EngineCoreOutputs(dead=str(error)))
            code = 1
        except Exception as error:
            logger.exception("the engine core died")
            log_dump(self.core)
            self.output_queue.put(EngineCoreOutputs(dead=f"{type(error).__name__}: {error}"))
            code = 1
        self.output_queue.put(None)
        sender.join()
        self.core.shutdown()
        return code

    def _shake_hands(self) -> Handshake:
        """Exchange a message each way with every client, which proves that all sockets are connected."""
        self._send_handshake(Hello(os.getpid()))
        init: Handshake | None = None
        for _ in self._outputs:
            kind, payload = self._input.recv_multipart()
            message = msgspec.msgpack.decode(payload, type=HandshakeMessage)
            if kind == RequestType.HANDSHAKE and isinstance(message, Handshake):
                init = message
            elif kind != RequestType.HANDSHAKE or not isinstance(message, Attached):
                raise TypeError(f"expected the handshake, got {type(message).__name__}")
        if init is None:
            raise TypeError("no client has sent the arguments")
        if init.engine_args.mm_tensor_ipc == "torch_shm":
            self._media = MediaReceiver(self._directory, len(self._outputs))
        self._send_handshake(Loading())
        return init

    @contextlib.contextmanager
    def _telling_progress(self) -> Iterator[None]:
        """Tell the clients how far the load is, in a thread that has the output sockets meanwhile."""
        ended = threading.Event()

        def tell() -> None:
            told = 0
            while not ended.wait(_PROGRESS_S):
                if (count := self._load.count) != told:
                    told = count
                    self._send_handshake(Advanced(self._load.step))

        teller = threading.Thread(target=tell, daemon=True, name="load progress")
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def _busy_loop(self) -> None:
        core = self.core
        while True:
            self._turned_at = time.monotonic()
            core.tick()
            if not core.has_work:
                core.executor.check_health()
                if not self.wait_for_input():
                    core.check_when_idle()
                    core.structured.warm_up()
                    self.output_queue.put(core.idle_outputs())
                    continue
            self.drain_inputs()
            if not core.has_work:
                core.lend_experts()
                self._beat_if_silent()
                continue
            outputs = core.step()
            if outputs.stats is not None:  # without stats a step was launched and none was processed
                self.output_queue.put(outputs)

    def _describe(self) -> str:
        """Describe the process for SIGUSR1. Called in a separate thread."""
        from argosy_engine.core.state_dump import describe

        now = time.monotonic()
        return (
            f"{describe(self.core, 'state of the engine core')}\n"
            f"  loop: turned {now - self._turned_at:.3f} s ago\n"
            f"  reader: unread={self._input_queue.qsize()} last message {now - self._received_at:.3f} s ago\n"
            f"  writer: unsent={self.output_queue.qsize()} last message {now - self._sent_at:.3f} s ago"
        )

    def _beat_if_silent(self) -> None:
        """Send a heartbeat if nothing was sent for long: the loop of a core that lends its experts is never idle."""
        if self._lockstep is not None and time.monotonic() - self._sent_at >= IDLE_HEARTBEAT_S:
            self.output_queue.put(self.core.idle_outputs())

    def _wait_for_ranks(self) -> None:
        """Called in each interval in which the loop waits for the other cores to join a step."""
        self.core.executor.check_health()
        self.output_queue.put(EngineCoreOutputs())

    def wait_for_input(self) -> bool:
        """Wait for the next message and handle it. Returns False after a heartbeat interval without one.

        Returns True as well if another core has begun a step.
        """
        if self._lockstep is not None:
            while self._input_queue.empty():
                if self._lockstep.is_called:
                    return True
                if not self._lockstep.wait(IDLE_HEARTBEAT_S):
                    return False
        try:
            message = self._input_queue.get(timeout=IDLE_HEARTBEAT_S)
        except queue.Empty:
            return False
        self._handle(message)
        return True

    def drain_inputs(self) -> None:
        """Handle all messages that have arrived."""
        while True:
            try:
                message = self._input_queue.get_nowait()
            except queue.Empty:
                return
            self._handle(message)

    def receive(self, kind: bytes, payload: Any) -> None:
        """Decode a message of the client and queue it for the loop. A malformed message fails at most its request."""
        if kind == RequestType.TENSOR:
            self._tensors.append(payload)
            return
        if kind == RequestType.FILE:
            self._tensors.append(self._passed(payload))
            return
        message = self._read(kind, payload)
        if message is not None:
            self._put(message)

    def _put(self, message: _Input) -> None:
        """Queue a message for the loop. Any thread may call it."""
        self._input_queue.put(message)
        if self._lockstep is not None:
            self._lockstep.wake()  # the loop waits for its bell instead

    def _read(self, kind: bytes, payload: bytes) -> _Input:
        """Decode a message in the input thread; None if it was malformed and has been answered or dropped."""
        try:
            if kind == RequestType.ADD:
                return self._read_addition(payload)
            if kind == RequestType.ABORT:
                return self._abort_decoder.decode(payload)
            if kind == RequestType.UTILITY:
                return self._utility_decoder.decode(payload)
            logger.error("unknown request type %r", kind)
        except msgspec.DecodeError as error:
            logger.error("dropped a malformed message of kind %r: %s", kind, error)
        return None

    def _passed(self, handle: bytes) -> PassedFile | NotPassed:
        """Return the file of an image, or why it has not come."""
        try:
            if self._media is None:
                raise NotPassed("no client passes files")
            return self._media.receive(handle)
        except NotPassed as error:
            return error

    def _read_addition(self, payload: bytes) -> _Addition | None:
        tensors, self._tensors = self._tensors, []
        try:
            message = self._add_decoder.decode(payload)
            if tensors or message.mm_features:
                message.mm_features = attach_tensors(message.mm_features, tensors)
            self._router.add(message.request_id, message.client_index)
            self._held_outputs.add(message)
            self._call_parameters.share(message)
            return _Addition(message, self.core.preprocess_request(message))
        except Exception as error:
            logger.exception("a request could not be read")
            request_id = msgspec.msgpack.decode(payload, type=_OnlyId).request_id
            self._refuse(request_id, f"{type(error).__name__}: {error}", ErrorKind.INTERNAL)
            return None

    def _handle(self, message: _Input) -> None:
        """Pass a decoded message to the core."""
        match message:
            case _Addition():
                self._add(message)
            case list():
                self.core.abort_requests(message)
                self._router.remove(message)
                self._held_outputs.remove(message)
            case UtilityCall():
                result = self._call(message)
                result.client_index = message.client_index
                self.output_queue.put(
                    EngineCoreOutputs(utility=result, residency=self.core.kv.announcer.take_delta())
                )

    def _call(self, call: UtilityCall) -> UtilityOutput:
        if call.method not in _LOADS_WEIGHTS:
            return _sendable(self.core.call_utility(call))
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), daemon=True, name="heartbeat")
        beat.start()
        try:
            return _sendable(self.core.call_utility(call))
        finally:
            ended.set()
            beat.join()

    def _beat(self, ended: threading.Event) -> None:
        """Send heartbeats in place of the loop while it loads weights, until the load stalls."""
        watch, seen = LoadWatch(self._load_stall_timeout), self._load.count
        while not ended.wait(IDLE_HEARTBEAT_S) and not watch.is_stalled:
            if self._load.count != seen:
                seen = self._load.count
                watch.advanced(self._load.step)
            self.output_queue.put(EngineCoreOutputs())

    def _add(self, addition: _Addition) -> None:
        request_id = addition.message.request_id
        try:
            self.core.add_request(*addition)
        except ResourceBusy as error:
            self._refuse(request_id, str(error), ErrorKind.BUSY)
        except EngineBusy as error:
            self._refuse(request_id, str(error), ErrorKind.ASLEEP)
        except Exception as error:
            logger.exception("a request could not be added")
            self._refuse(request_id, f"{type(error).__name__}: {error}", ErrorKind.INTERNAL)

    def _refuse(self, request_id: str, error: str, kind: ErrorKind) -> None:
        refused = EngineCoreOutput(request_id, [], FinishReason.ERROR, error=error, error_kind=kind)
        self.output_queue.put(EngineCoreOutputs(outputs=[refused]))

    def process_input_socket(self) -> None:
        """Receive the client's messages for ever. Runs in the input thread; a failure ends the process."""
        with _ending_process():
            while True:
                kind = self._input.recv()
                while True:
                    if not self._input.getsockopt(zmq.RCVMORE):
                        raise ValueError(f"a frame of type {kind!r} without another one")
                    is_tensor = kind == RequestType.TENSOR  # which stays where ZMQ has received it
                    payload = self._input.recv(copy=False).buffer if is_tensor else self._input.recv()
                    self._received_at = time.monotonic()
                    self.receive(kind, payload)
                    if not self._input.getsockopt(zmq.RCVMORE):
                        break
                    kind = self._input.recv()

    def process_output_socket(self) -> None:
        """Send the output queue until its end. Runs in the output thread; a failure ends the process."""
        with _ending_process():
            held = self._held_outputs
            while True:
                if held.is_due:
                    self._send_held(held.take_due)
                try:
                    outputs = self.output_queue.get(timeout=held.wait_s)
                except queue.Empty:
                    continue
                if outputs is None:
                    break
                for client, message in self._router.route(outputs):
                    if messages := held.pass_on(client, message):
                        self._outputs[client].send_multipart(messages)
                self._sent_at = time.monotonic()
            self._send_held(held.take)
            for socket in self._outputs:
                socket.close()

    def _send_held(self, take: Callable[[int], list[bytes]]) -> None:
        """Send what was held back for each client. The frames of one message arrive together, and are read singly."""
        for client, socket in enumerate(self._outputs):
            if held := take(client):
                socket.send_multipart(held)

    def _send_handshake(self, message: HandshakeMessage) -> None:
        for socket in self._outputs:
            socket.send(msgspec.msgpack.encode(message))


def _sendable(output: UtilityOutput) -> UtilityOutput:
    """Return the output, or a failure if its result cannot be encoded; it may come from a user's worker class."""
    try:
        msgspec.msgpack.encode(output)
    except Exception as error:
        return UtilityOutput(output.call_id, f"the result cannot be sent: {error}")
    return output


@contextlib.contextmanager
def _ending_process() -> Iterator[None]:
    """End the process if the block fails.

    Without its input and output threads the core cannot communicate, but would still look healthy.
    """
    try:
        yield
    except Exception:
        logger.exception("the thread %s died", threading.current_thread().name)
        os._exit(1)


def _exit_with_parent(directory: Path) -> None:
    """Wait until the client closes our standard input, then remove leftover files and exit at once."""
    while os.read(0, 4096):
        pass
    # The directory is left only if the client was killed before both sockets were connected.
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def main() -> int:
    name, directory, parent, num_clients = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    name_process(name)
    configure_logging("INFO", process=name)
    # A terminal's Ctrl-C goes to the whole process group, but the API process decides when the core ends.
    dump_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(directory,), daemon=True, name="parent").start()
    output_context: zmq.Context[Any] = zmq.Context()
    code = CoreProcess(directory, parent, zmq.Context(), output_context, num_clients).run()
    output_context.destroy(_LINGER_MS)  # waits until the clients have everything
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

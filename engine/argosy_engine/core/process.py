"""The EngineCore process: `python -m argosy_engine.core.process HANDSHAKE_ADDRESS`.

Three threads: input (decode messages from the client), the busy loop (owns the core), output (encode and send).
The process lives exactly as long as its client: standard input is a pipe from it, and end of file means exit.
Sockets are ipc in the client's private directory; messages are typed msgpack.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from argosy_engine.core.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Failed,
    FinishReason,
    Handshake,
    HandshakeMessage,
    Hello,
    Ready,
    RequestType,
    UtilityCall,
)
from argosy_engine.errors import ConfigError

logger = logging.getLogger("argosy.core")

IDLE_HEARTBEAT_S = 0.5
_BUSY_STATS_INTERVAL_S = 0.05
"""While stepping, statistics ride along at most this often: the API process has better things to decode."""
_LINGER_MS = 4000
"""Long enough for the message that tells why the core died."""


class CoreProcess:
    def __init__(self, handshake_address: str) -> None:
        self._context = zmq.Context()
        self._handshake = self._context.socket(zmq.DEALER)
        self._handshake.setsockopt(zmq.LINGER, _LINGER_MS)
        self._handshake.connect(handshake_address)
        self._inputs: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()
        self._add_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._abort_decoder = msgspec.msgpack.Decoder(list[str])
        self._utility_decoder = msgspec.msgpack.Decoder(UtilityCall)

    def run(self) -> int:
        """Start, serve, report why it ended. The exit code is 0 only for an orderly end."""
        self._send_handshake(Hello(os.getpid()))
        init = msgspec.msgpack.decode(self._handshake.recv(), type=HandshakeMessage)
        if not isinstance(init, Handshake):
            raise TypeError(f"expected the handshake, got {type(init).__name__}")
        started = time.perf_counter()
        try:
            import torch  # noqa: F401  (timed as a phase of its own)

            imported = time.perf_counter() - started
            from argosy_engine.core.engine_core import EngineCore
            from argosy_engine.executor.uniproc import UniprocExecutor

            self.core = EngineCore(init.engine_args, UniprocExecutor(init.engine_args))
        except ConfigError as error:
            self._send_handshake(Failed(str(error), True))
            return 2
        except Exception as error:
            logger.exception("the engine core could not start")
            self._send_handshake(Failed(f"{type(error).__name__}: {error}", False))
            return 1
        config = self.core.config
        phases = (("import torch", imported), *config.startup_phases)
        threading.Thread(target=self._receive, args=(init.input_address,), daemon=True, name="input").start()
        sender = threading.Thread(target=self._send, args=(init.output_address,), name="output")
        sender.start()
        # What lives now lives on: keep it out of every later garbage collection.
        gc.collect()
        gc.freeze()
        self._send_handshake(Ready(msgspec.structs.replace(config, startup_phases=phases)))
        code = 0
        try:
            self._busy_loop()
        except Exception as error:
            logger.exception("the engine core died")
            self._outputs.put(EngineCoreOutputs(dead=f"{type(error).__name__}: {error}"))
            code = 1
        self._outputs.put(None)
        sender.join()
        self.core.shutdown()
        return code

    def _busy_loop(self) -> None:
        core = self.core
        last_stats = 0.0
        while True:
            if not core.has_work and not self._wait_for_input():
                core.check_when_idle()
                self._outputs.put(core.idle_outputs())
                last_stats = time.monotonic()
                continue
            self._drain_inputs()
            if not core.has_work:
                continue
            outputs = core.step()
            now = time.monotonic()
            if outputs.outputs or outputs.residency or now - last_stats > _BUSY_STATS_INTERVAL_S:
                last_stats = now
                self._outputs.put(outputs)

    def _wait_for_input(self) -> bool:
        """Blocks for the next message; False after a heartbeat's time without one."""
        try:
            kind, payload = self._inputs.get(timeout=IDLE_HEARTBEAT_S)
        except queue.Empty:
            return False
        self._handle(kind, payload)
        return True

    def _drain_inputs(self) -> None:
        while True:
            try:
                kind, payload = self._inputs.get_nowait()
            except queue.Empty:
                return
            self._handle(kind, payload)

    def _handle(self, kind: bytes, payload: bytes) -> None:
        if kind == RequestType.ADD:
            request = self._add_decoder.decode(payload)
            try:
                self.core.add_request(request)
            except Exception as error:  # a request's fault must stay that request's
                logger.exception("request %s could not be added", request.request_id)
                failed = EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(error))
                self._outputs.put(EngineCoreOutputs(outputs=[failed]))
        elif kind == RequestType.ABORT:
            self.core.abort_requests(self._abort_decoder.decode(payload))
        elif kind == RequestType.UTILITY:
            result = self.core.call_utility(self._utility_decoder.decode(payload))
            self._outputs.put(
                EngineCoreOutputs(utility=result, residency=self.core.kv.residency.take_delta())
            )
        else:
            logger.error("unknown request type %r", kind)

    def _receive(self, address: str) -> None:
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        while True:
            kind, payload = socket.recv_multipart()
            self._inputs.put((kind, payload))

    def _send(self, address: str) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(address)
        encoder = msgspec.msgpack.Encoder()
        while (outputs := self._outputs.get()) is not None:
            socket.send(encoder.encode(outputs))
        socket.close()

    def _send_handshake(self, message: HandshakeMessage) -> None:
        self._handshake.send(msgspec.msgpack.encode(message))


def _exit_with_parent(directory: Path) -> None:
    """Blocks until the client's end of our standard input closes, then removes the sockets and leaves at once."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(OSError):  # a client that was killed could not; it knows no other files there
        for socket in ("handshake", "input", "output"):
            (directory / socket).unlink(missing_ok=True)
        directory.rmdir()
    os._exit(0)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # The terminal's Ctrl-C goes to the whole group; the API process decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = sys.argv[1]
    directory = Path(address.removeprefix("ipc://")).parent
    threading.Thread(target=_exit_with_parent, args=(directory,), daemon=True, name="parent").start()
    code = CoreProcess(address).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

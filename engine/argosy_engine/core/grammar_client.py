"""GrammarProcess: the process that compiles grammars, as the engine core sees it. A `structured.compiler.Backend`.

The process is started with the first grammar and again after its end, whatever ended it; engines that never use
grammars do not pay for it. Two bonds tie its life to the core's: the socket between them, and the kernel (`lifeline`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from argosy_engine.core.grammar_process import (
    COMPILED,
    FAULT,
    LOWER_PRIORITY,
    STARTED,
    TABLE,
    GrammarProcessArgs,
    Job,
    framed,
)
from argosy_engine.executor.lifeline import parent_argument
from argosy_engine.structured.compiler import DEADLINE_S, BackendUnavailable
from argosy_engine.structured.vocabulary import TokenTable
from argosy_engine.structured.xgrammar_backend import Deserializer, Serialized

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from argosy_engine.structured.params import GrammarSpec

MAX_ANSWER_BYTES = 256 << 20
"""Of a compiled grammar as text; a schema of 60 patterns over 100k tokens has 67 MB."""
_EXIT_TIMEOUT_S = 2.0


class GrammarProcess:
    """
    Args:
        deadline_s: after it the kernel kills a compilation, should nobody have done so before.
    """

    def __init__(self, args: GrammarProcessArgs, deadline_s: float = DEADLINE_S) -> None:
        self._args = args
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._deserializer: Deserializer | None = None
        self._deserializer_lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def new_compilation(self) -> ForkedCompilation:
        """
        Raises:
            OSError: the process cannot be started.
        """
        return ForkedCompilation(self, self._connect())

    def deserializer(self) -> Deserializer:
        """Made once, by whoever needs it first: it takes a part of a second.

        Raises:
            BackendUnavailable: there is no vocabulary.
        """
        with self._deserializer_lock:
            if self._deserializer is None:
                with contextlib.closing(self._connect()) as job:
                    job.settimeout(self.deadline_s)
                    self._deserializer = Deserializer(
                        msgspec.msgpack.decode(ask(job, Job(self.deadline_s), TABLE), type=TokenTable)
                    )
            return self._deserializer

    def close(self) -> None:
        """Ends the process, and with it what it compiles."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                try:
                    self._process.wait(_EXIT_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = self._control = None

    def _connect(self) -> socket.socket:
        """Our end of a new job's socket; the other one is on its way to the process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"J"], [theirs.fileno()])
                except ConnectionError:  # it ends just now
                    self._start()
                    socket.send_fds(self._control, [b"J"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)  # it has room for more jobs than there may be
        safe_path = ["-P"] if sys.flags.safe_path else []
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [
                    sys.executable,
                    *safe_path,
                    "-m",
                    "argosy_engine.core.grammar_process",
                    str(theirs.fileno()),
                    parent_argument(),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A process with threads must not fork.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._control.send(framed(msgspec.msgpack.encode(self._args)))


class ForkedCompilation:
    """One grammar, compiled in a process of its own."""

    def __init__(self, process: GrammarProcess, job: socket.socket) -> None:
        self._process = process
        self._job = job
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, spec: GrammarSpec) -> CompiledGrammar:
        """Blocks; see `structured.compiler.Compilation`."""
        try:
            answer = ask(self._job, Job(self._process.deadline_s, spec), COMPILED)
        finally:
            with self._lock:
                self._is_closed = True
                self._job.close()
        return self._process.deserializer().grammar(msgspec.msgpack.decode(answer, type=Serialized))

    def kill(self) -> None:
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(OSError):
                    self._job.shutdown(socket.SHUT_RDWR)

    def lower_priority(self) -> None:
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(OSError):
                    self._job.send(LOWER_PRIORITY, socket.MSG_DONTWAIT)


def ask(job: socket.socket, question: Job, expected: bytes) -> bytes:
    """The answer of this kind, in msgpack.

    Raises:
        ValueError: what is wrong with the grammar.
        BackendUnavailable: it is not the grammar's fault.
    """
    received = bytearray()
    try:
        job.sendall(framed(msgspec.msgpack.encode(question)))
        while chunk := job.recv(1 << 20):
            received += chunk
            if len(received) > MAX_ANSWER_BYTES:
                raise ValueError(f"compiled, it has more than {MAX_ANSWER_BYTES >> 20} MiB")
    except OSError as error:  # a process that ends with unread data resets the connection
        if not received:
            raise BackendUnavailable(str(error)) from None
    if not received.startswith(STARTED):
        raise BackendUnavailable("the process that compiles grammars ended")
    kind, answer = bytes(received[1:2]), bytes(memoryview(received)[2:])
    if kind == expected:
        return answer
    if kind == b"":
        raise ValueError("compiling it ended the compiler: it takes too much time or memory")
    text = msgspec.msgpack.decode(answer, type=str)
    if kind == FAULT:
        raise BackendUnavailable(text)
    raise ValueError(text)

"""GrammarProcess: the process that compiles grammars, as the engine core sees it. A `structured.compiler.Backend`.

The process is started with the first grammar and again after its end, whatever ended it; engines that never use
grammars do not pay for it. Two bonds tie its life to the core's: the socket between them, and the kernel (`lifeline`).

A process that does not fork in time, because it is stopped or hangs in the kernel, is killed and replaced. What counts
is the clock: such a process uses no CPU time. A grammar that lost its process is compiled once more, by the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from argosy_engine.core.grammar_process import (
    COMPILED,
    FAULT,
    FORKED,
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
FORK_TIMEOUT_S = 3.0
"""From asking for a compilation to its process. A fork takes milliseconds, on a crowded machine a part of a second."""
WARM_UP_TIMEOUT_S = 20.0
"""From the start of the process to its first fork. Importing XGrammar and reading the vocabulary take 0.5 s, several on
a busy machine; what remains of a request's deadline is for a second try."""
TABLE_TIMEOUT_S = 10.0
"""For the vocabulary, which the process has already; all grammars wait for the first one to fetch it."""
_KILL_GRACE_S = 1.0
"""From a compilation's deadline, where the kernel's timer ends it, to our giving up on it: the timer of a process that
is stopped does nothing."""
_EXIT_TIMEOUT_S = 2.0
_ORPHAN_S = 0.1
"""From the end of a compilation that fell with the process to our knowing of the process's end."""

logger = logging.getLogger("argosy.structured")


class ProcessLost(BackendUnavailable):
    """The process that was to compile, or compiled, is no more; nothing is known against the grammar."""


class _ForkServer:
    """One process, from its start to its end.

    Raises (from the constructor):
        OSError: it cannot be started.
    """

    def __init__(self, args: GrammarProcessArgs, warm_up_timeout_s: float) -> None:
        self.is_warm = False
        """Whether it has forked."""
        self._is_killed = False
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)  # it has room for more jobs than there may be
        safe_path = ["-P"] if sys.flags.safe_path else []
        try:
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
        except BaseException:
            self._control.close()
            raise
        self._warm_by = time.monotonic() + warm_up_timeout_s
        self._control.send(framed(msgspec.msgpack.encode(args)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._is_killed or self._process.poll() is not None

    def has_ended(self, timeout_s: float) -> bool:
        """Whether it is over by then."""
        return self._is_killed or self.is_reaped(timeout_s)

    def is_reaped(self, timeout_s: float = 0.0) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def patience_s(self, fork_timeout_s: float) -> float:
        """How long a fork may take from now on."""
        return fork_timeout_s if self.is_warm else max(fork_timeout_s, self._warm_by - time.monotonic())

    def send(self, job: socket.socket) -> None:
        socket.send_fds(self._control, [b"J"], [job.fileno()])

    def kill(self) -> None:
        """Ends it and, by the kernel, all that it forked. Never blocks: a process that hangs in the kernel ends when
        that lets it go."""
        self._is_killed = True
        self._control.close()
        self._process.kill()

    def end(self) -> None:
        """As `kill`, but lets it go by itself if it does so soon."""
        self._control.close()
        if not self.is_reaped(_EXIT_TIMEOUT_S):
            self.kill()
            self.is_reaped(_EXIT_TIMEOUT_S)


class GrammarProcess:
    """
    Args:
        deadline_s: after it the kernel kills a compilation, should nobody have done so before.
        fork_timeout_s: see `FORK_TIMEOUT_S`.
        warm_up_timeout_s: see `WARM_UP_TIMEOUT_S`.
    """

    def __init__(
        self,
        args: GrammarProcessArgs,
        deadline_s: float = DEADLINE_S,
        fork_timeout_s: float = FORK_TIMEOUT_S,
        warm_up_timeout_s: float = WARM_UP_TIMEOUT_S,
    ) -> None:
        self._args = args
        self.deadline_s = deadline_s
        self.fork_timeout_s = fork_timeout_s
        self._warm_up_timeout_s = warm_up_timeout_s
        self._lock = threading.Lock()
        self._server: _ForkServer | None = None
        self._killed: list[_ForkServer] = []
        """Until they are reaped."""
        self._deserializer: Deserializer | None = None
        self._deserializer_lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        server = self._server
        return None if server is None else server.pid

    def new_compilation(self) -> ForkedCompilation:
        """
        Raises:
            OSError: the process cannot be started.
        """
        return ForkedCompilation(self)

    def deserializer(self) -> Deserializer:
        """Made once, by whoever needs it first: it takes a part of a second.

        Raises:
            BackendUnavailable: there is no vocabulary.
        """
        with self._deserializer_lock:
            if self._deserializer is None:
                try:
                    answer = ForkedCompilation(self).ask(Job(min(self.deadline_s, TABLE_TIMEOUT_S)), TABLE)
                except OSError as error:
                    raise BackendUnavailable(str(error)) from None
                self._deserializer = Deserializer(msgspec.msgpack.decode(answer, type=TokenTable))
            return self._deserializer

    def close(self) -> None:
        """Ends the process, and with it what it compiles."""
        with self._lock:
            if self._server is not None:
                self._server.end()
            for server in self._killed:
                server.is_reaped(_EXIT_TIMEOUT_S)
            self._server = None

    def connect(self) -> _Connection:
        """A new job; the other end of its socket is on its way to the process.

        Raises:
            OSError: the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                server = self._running()
                try:
                    server.send(theirs)
                except ConnectionError:  # it ends just now
                    self._drop(server)
                    server = self._running()
                    server.send(theirs)
        except BaseException:
            ours.close()
            raise
        return _Connection(server, ours)

    def replace(self, server: _ForkServer) -> None:
        """Kills a process that hangs; the next job starts another."""
        with self._lock:
            if self._server is server:
                logger.error(
                    "process %d, which compiles grammars, does not answer and is replaced", server.pid
                )
                self._drop(server)

    def _running(self) -> _ForkServer:
        if self._server is not None and self._server.is_over:
            self._drop(self._server)
        self._killed = [server for server in self._killed if not server.is_reaped()]
        if self._server is None:
            self._server = _ForkServer(self._args, self._warm_up_timeout_s)
        return self._server

    def _drop(self, server: _ForkServer) -> None:
        server.kill()
        self._killed.append(server)
        self._server = None


class _Connection:
    """The socket of one job, and the processes that work on it. Thread-safe."""

    def __init__(self, server: _ForkServer, job: socket.socket) -> None:
        self.server = server
        self.job = job
        self._lock = threading.Lock()
        self._pidfd: int | None = None
        self._is_closed = self._is_asked = self._is_lowered = False

    def await_fork(self, timeout_s: float) -> None:
        """
        Raises:
            TimeoutError: the server does not fork.
            EOFError: the server, or the job, has ended.
            OSError: as EOFError.
        """
        self.job.settimeout(timeout_s)
        data, fds, _, _ = socket.recv_fds(self.job, 1, 1)
        with self._lock:
            if fds and self._is_closed:
                os.close(fds[0])
            elif fds:
                self._pidfd = fds[0]
        if data != FORKED:
            raise EOFError
        self.server.is_warm = True

    def kill(self) -> None:
        """Ends the job at once, also where its process is stopped; reading and writing fail from here on."""
        with self._lock:
            if self._is_closed:
                return
            with contextlib.suppress(OSError):
                self.job.shutdown(socket.SHUT_RDWR)
            self._kill_forked()

    def ask(self, question: Job) -> None:
        """Raises OSError if the process has ended."""
        self.job.sendall(framed(msgspec.msgpack.encode(question)))
        with self._lock:
            self._is_asked = True
            if self._is_lowered:
                self._send_lowered()

    def lower_priority(self) -> None:
        """From here on, or from when it has been asked: nothing comes before the question."""
        with self._lock:
            self._is_lowered = True
            if self._is_asked:
                self._send_lowered()

    def _send_lowered(self) -> None:
        if not self._is_closed:
            with contextlib.suppress(OSError):
                self.job.send(LOWER_PRIORITY, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Leaves no process behind."""
        with self._lock:
            self._is_closed = True
            self._kill_forked()
            self.job.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _kill_forked(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class ForkedCompilation:
    """One grammar, compiled in a process of its own."""

    def __init__(self, process: GrammarProcess) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._connection = process.connect()
        self._is_killed = self._is_lowered = False

    def run(self, spec: GrammarSpec) -> CompiledGrammar:
        """Blocks; see `structured.compiler.Compilation`."""
        answer = self.ask(Job(self._process.deadline_s, spec), COMPILED)
        return self._process.deserializer().grammar(msgspec.msgpack.decode(answer, type=Serialized))

    def ask(self, question: Job, expected: bytes) -> bytes:
        """The answer of this kind, in msgpack. Asks a second time if the process was lost.

        Raises:
            ValueError: what is wrong with the grammar.
            BackendUnavailable: it is not the grammar's fault.
        """
        try:
            return self._ask(question, expected)
        except ProcessLost:
            self._reconnect()
            return self._ask(question, expected)

    def kill(self) -> None:
        with self._lock:
            self._is_killed = True
            self._connection.kill()

    def lower_priority(self) -> None:
        with self._lock:
            self._is_lowered = True
            self._connection.lower_priority()

    def _reconnect(self) -> None:
        """
        Raises:
            BackendUnavailable: it was killed meanwhile, or there is no other process.
        """
        try:
            connection = self._process.connect()
        except OSError as error:
            raise BackendUnavailable(str(error)) from None
        with self._lock:
            self._connection = connection
            if self._is_killed:
                connection.close()
                raise BackendUnavailable("it was cancelled")
            if self._is_lowered:
                connection.lower_priority()

    def _ask(self, question: Job, expected: bytes) -> bytes:
        connection = self._connection
        server = connection.server
        try:
            try:
                connection.await_fork(server.patience_s(self._process.fork_timeout_s))
            except TimeoutError:
                self._process.replace(server)
                raise ProcessLost("the process that compiles grammars did not answer") from None
            except (EOFError, OSError):
                raise self._lost() from None
            received = self._answer(connection, question)
            is_unanswered = len(received) < 2
            if not received.startswith(STARTED) or (
                is_unanswered and (self._is_killed or server.has_ended(_ORPHAN_S))
            ):
                raise self._lost()
        finally:
            connection.close()
        return _content(received, expected)

    def _answer(self, connection: _Connection, question: Job) -> bytearray:
        """All that comes; what has come before a fault of the connection."""
        received = bytearray()
        give_up_at = time.monotonic() + question.deadline_s + _KILL_GRACE_S
        try:
            connection.ask(question)
            while True:
                connection.job.settimeout(max(give_up_at - time.monotonic(), 0.001))
                chunk = connection.job.recv(1 << 20)
                received += chunk
                if not chunk:
                    return received
                if len(received) > MAX_ANSWER_BYTES:
                    raise ValueError(f"compiled, it has more than {MAX_ANSWER_BYTES >> 20} MiB")
        except TimeoutError:
            raise BackendUnavailable("the process that compiled the grammar hung") from None
        except OSError:  # a process that ends with unread data resets the connection
            return received

    def _lost(self) -> BackendUnavailable:
        if self._is_killed:
            return BackendUnavailable("it was cancelled")
        return ProcessLost("the process that compiles grammars ended")


def _content(received: bytearray, expected: bytes) -> bytes:
    """The answer behind `STARTED`, if it is of the expected kind. Raises as `ForkedCompilation.ask`."""
    kind, answer = bytes(received[1:2]), bytes(memoryview(received)[2:])
    if kind == expected:
        return answer
    if kind == b"":
        raise ValueError("compiling it ended the compiler: it takes too much time or memory")
    text = msgspec.msgpack.decode(answer, type=str)
    if kind == FAULT:
        raise BackendUnavailable(text)
    raise ValueError(text)

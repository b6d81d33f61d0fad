"""GrammarClient: the engine core's client of the fork server that compiles grammars. A `compile_queue.Backend`.

The process is started with the first grammar, or by `warm_up` once the engine is idle, and again with the next grammar
after it has ended for whatever reason. It ends with the core, because the socket between them closes and because the
kernel kills it (`osproc.child_process`). Whichever thread needs it, a `SpawnerThread` starts it: compile threads end
before it does.

A server that does not fork in time, because it is stopped or hangs in the kernel, is killed and replaced. Wall clock
time decides, because such a process uses no CPU time. If a server is lost, the next one compiles the grammar again,
once.
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

from argosy_engine.osproc.child_process import SpawnerThread, parent_argument
from argosy_engine.structured import compile_queue
from argosy_engine.structured.compile_queue import BackendUnavailable
from argosy_engine.structured.grammar_messages import (
    COMPILED,
    FAULT,
    FORKED,
    LOWER_PRIORITY,
    STARTED,
    TABLE,
    CompileJob,
    GrammarServerArgs,
    framed,
)
from argosy_engine.structured.vocabulary import TokenTable
from argosy_engine.structured.xgrammar_backend import Deserializer, Serialized

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from argosy_engine.structured.structured_outputs_params import GrammarSpec

MAX_ANSWER_BYTES = 256 << 20
"""Maximum size of a compiled grammar as text. A schema of 60 patterns over 100k tokens takes 67 MB."""
FORK_TIMEOUT_S = 3.0
"""Limit for a fork of the running process. It takes milliseconds, or a fraction of a second on a busy machine."""
WARM_UP_TIMEOUT_S = 20.0
"""Limit from the start of the process to its first fork. Importing XGrammar and reading the vocabulary take 0.5 s, or
several seconds on a busy machine. The rest of a request's deadline is left for a second attempt."""
TABLE_TIMEOUT_S = 10.0
"""Limit for fetching the vocabulary, which the process has already read; all grammars wait for the first fetch."""
_KILL_GRACE_S = 1.0
"""How long to wait after a compilation's deadline, when the kernel's timer should have killed it, before giving up: a
stopped process is not killed by its timer."""
EXIT_TIMEOUT_S = 2.0
"""How long `close` waits for the end of a killed process, which may hang in the kernel."""
_ORPHAN_S = 0.1
"""How long the end of the process may be noticed after the end of a compilation that it took with it."""

logger = logging.getLogger("argosy.structured")


def _patient(limit_s: float) -> float:
    return limit_s * compile_queue.PATIENCE


class ProcessLost(BackendUnavailable):
    """The compiling process ended before it answered, for a reason that is not known to be the grammar."""


class _ForkServer:
    """Handle of one fork server, from its start to its end.

    Raises (from the constructor):
        OSError: the process cannot be started.
    """

    def __init__(self, args: GrammarServerArgs, warm_up_timeout_s: float) -> None:
        self.is_warm = False
        """Whether it has forked at least once."""
        self._is_killed = False
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)  # its buffer holds more jobs than there can be
        safe_path = ["-P"] if sys.flags.safe_path else []
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                    [
                        sys.executable,
                        *safe_path,
                        "-m",
                        "argosy_engine.structured.grammar_server",
                        str(theirs.fileno()),
                        parent_argument(),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # The server must have one thread only, because it forks.
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
        """Whether it ends within the given time, or has been killed."""
        return self._is_killed or self.is_reaped(timeout_s)

    def is_reaped(self, timeout_s: float = 0.0) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def patience_s(self, fork_timeout_s: float) -> float:
        """Return how many seconds a fork may take from now on; the first one has to wait for the warm-up."""
        return fork_timeout_s if self.is_warm else max(fork_timeout_s, self._warm_by - time.monotonic())

    def send(self, job: socket.socket) -> None:
        socket.send_fds(self._control, [b"J"], [job.fileno()])

    def kill(self) -> None:
        """Kill the process; the kernel then kills its forks. Never blocks, even if the process hangs in the kernel."""
        self._is_killed = True
        self._control.close()
        self._process.kill()

    def end(self) -> None:
        """Kill the process, which has nothing to lose and may not read for seconds (imports), and wait for its end."""
        self.kill()
        self.is_reaped(_patient(EXIT_TIMEOUT_S))


class GrammarClient:
    """Client of the fork server, which it starts and replaces. Thread-safe.

    Args:
        deadline_s: seconds after which the kernel kills a compilation that has not been killed before; None: the
            limit of the compile queue.
        fork_timeout_s: None: `FORK_TIMEOUT_S`.
        warm_up_timeout_s: None: `WARM_UP_TIMEOUT_S`.
    """

    def __init__(
        self,
        args: GrammarServerArgs,
        deadline_s: float | None = None,
        fork_timeout_s: float | None = None,
        warm_up_timeout_s: float | None = None,
    ) -> None:
        self._args = args
        self.deadline_s = _patient(compile_queue.DEADLINE_S) if deadline_s is None else deadline_s
        self.fork_timeout_s = _patient(FORK_TIMEOUT_S) if fork_timeout_s is None else fork_timeout_s
        self._warm_up_timeout_s = (
            _patient(WARM_UP_TIMEOUT_S) if warm_up_timeout_s is None else warm_up_timeout_s
        )
        self._lock = threading.Lock()
        self._spawner = SpawnerThread("grammar process starter")
        self._server: _ForkServer | None = None
        self._killed: list[_ForkServer] = []
        """Killed processes that are not reaped yet."""
        self._deserializer: Deserializer | None = None
        self._deserializer_lock = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        server = self._server
        return None if server is None else server.pid

    def new_compilation(self) -> ForkedCompilation:
        """Ask for a fork, and start the process if it does not run.

        Raises:
            OSError: the process cannot be started.
        """
        return ForkedCompilation(self)

    def warm_up(self) -> None:
        """Start the process and make the deserializer, which takes 0.5 s of CPU time and 61 MB.

        Otherwise the first request with a grammar waits for it, several seconds on a busy machine.
        """
        self.deserializer()

    def deserializer(self) -> Deserializer:
        """Return the deserializer, made on first use in a fraction of a second.

        Raises:
            BackendUnavailable: the vocabulary cannot be fetched.
        """
        with self._deserializer_lock:
            if self._deserializer is None:
                try:
                    answer = ForkedCompilation(self).ask(
                        CompileJob(min(self.deadline_s, _patient(TABLE_TIMEOUT_S))), TABLE
                    )
                except (OSError, ValueError) as error:  # whatever it is, no grammar is to blame
                    raise BackendUnavailable(f"the vocabulary cannot be fetched: {error}") from None
                self._deserializer = Deserializer(msgspec.msgpack.decode(answer, type=TokenTable))
            return self._deserializer

    def close(self) -> None:
        """End the process and its compilations. No other process is started from then on."""
        with self._lock:
            self._is_closed = True
            if self._server is not None:
                self._server.end()
            for server in self._killed:
                server.is_reaped(_patient(EXIT_TIMEOUT_S))
            self._server = None
            self._spawner.close()

    def connect(self) -> _Connection:
        """Send the process the socket of a new job, and return our end.

        Raises:
            OSError: the process cannot be started, or the client is closed.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                server = self._running()
                try:
                    server.send(theirs)
                except ConnectionError:  # the process has just ended
                    self._drop(server)
                    server = self._running()
                    server.send(theirs)
        except BaseException:
            ours.close()
            raise
        return _Connection(server, ours)

    def replace(self, server: _ForkServer) -> None:
        """Kill a process that hangs; the next job starts another one."""
        with self._lock:
            if self._server is server:
                logger.error(
                    "process %d, which compiles grammars, does not answer and is replaced", server.pid
                )
                self._drop(server)

    def _running(self) -> _ForkServer:
        if self._is_closed:
            raise OSError("the engine is shutting down")
        if self._server is not None and self._server.is_over:
            self._drop(self._server)
        self._killed = [server for server in self._killed if not server.is_reaped()]
        if self._server is None:
            try:
                self._server = self._spawner.call(lambda: _ForkServer(self._args, self._warm_up_timeout_s))
            except RuntimeError as error:
                raise OSError(str(error)) from None
        return self._server

    def _drop(self, server: _ForkServer) -> None:
        server.kill()
        self._killed.append(server)
        self._server = None


class _Connection:
    """Socket of one job, with its fork server and its forked process. Thread-safe."""

    def __init__(self, server: _ForkServer, job: socket.socket) -> None:
        self.server = server
        self.job = job
        self._lock = threading.Lock()
        self._pidfd: int | None = None
        self._is_closed = self._is_asked = self._is_lowered = False

    def await_fork(self, timeout_s: float) -> None:
        """Wait until the server has forked for this job.

        Raises:
            TimeoutError: the server did not fork in time.
            EOFError: the server or the job has ended.
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
        """End the job at once, even if its process is stopped. Reading and writing fail from then on."""
        with self._lock:
            if self._is_closed:
                return
            with contextlib.suppress(OSError):
                self.job.shutdown(socket.SHUT_RDWR)
            self._kill_forked()

    def ask(self, question: CompileJob) -> None:
        """Send the job. Raises OSError if the process has ended."""
        self.job.sendall(framed(msgspec.msgpack.encode(question)))
        with self._lock:
            self._is_asked = True
            if self._is_lowered:
                self._send_lowered()

    def lower_priority(self) -> None:
        """Lower the job's priority now, or as soon as `ask` has sent it: the job must be the first message."""
        with self._lock:
            self._is_lowered = True
            if self._is_asked:
                self._send_lowered()

    def _send_lowered(self) -> None:
        if not self._is_closed:
            with contextlib.suppress(OSError):
                self.job.send(LOWER_PRIORITY, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close the socket and kill the forked process."""
        with self._lock:
            self._is_closed = True
            self._kill_forked()
            self.job.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _kill_forked(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(OSError):  # it has ended already
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class ForkedCompilation:
    """Compilation of one grammar in a forked process."""

    def __init__(self, client: GrammarClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._connection = client.connect()
        self._is_killed = self._is_lowered = False

    def run(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile the grammar. Blocks; see `compile_queue.Compilation`."""
        answer = self.ask(CompileJob(self._client.deadline_s, spec), COMPILED)
        return self._client.deserializer().grammar(msgspec.msgpack.decode(answer, type=Serialized))

    def ask(self, question: CompileJob, expected: bytes) -> bytes:
        """Run a job and return its answer in msgpack. Tries a second time if the process was lost.

        Raises:
            ValueError: the grammar is invalid or too expensive; the message tells why.
            BackendUnavailable: it failed for a reason other than the grammar.
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
        """Connect to the next process.

        Raises:
            BackendUnavailable: the compilation was killed meanwhile, or no process can be started.
        """
        try:
            connection = self._client.connect()
        except OSError as error:
            raise BackendUnavailable(str(error)) from None
        with self._lock:
            self._connection = connection
            if self._is_killed:
                connection.close()
                raise BackendUnavailable("it was cancelled")
            if self._is_lowered:
                connection.lower_priority()

    def _ask(self, question: CompileJob, expected: bytes) -> bytes:
        connection = self._connection
        server = connection.server
        try:
            try:
                connection.await_fork(server.patience_s(self._client.fork_timeout_s))
            except TimeoutError:
                self._client.replace(server)
                raise ProcessLost("the process that compiles grammars did not answer") from None
            except (EOFError, OSError):
                raise self._lost() from None
            received = self._answer(connection, question)
            is_unanswered = len(received) < 2
            if not received.startswith(STARTED) or (
                is_unanswered and (self._is_killed or server.has_ended(_patient(_ORPHAN_S)))
            ):
                raise self._lost()
        finally:
            connection.close()
        return _content(received, expected)

    def _answer(self, connection: _Connection, question: CompileJob) -> bytearray:
        """Send the job and return all bytes received until the connection ends or breaks.

        Raises:
            ValueError: the answer is longer than `MAX_ANSWER_BYTES`.
            BackendUnavailable: the process hung.
        """
        received = bytearray()
        give_up_at = time.monotonic() + question.deadline_s + _patient(_KILL_GRACE_S)
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
        except OSError:  # the connection is reset if the process ends with unread data
            return received

    def _lost(self) -> BackendUnavailable:
        if self._is_killed:
            return BackendUnavailable("it was cancelled")
        return ProcessLost("the process that compiles grammars ended")


def _content(received: bytearray, expected: bytes) -> bytes:
    """Return the answer after `STARTED` if it is of the expected kind. Raises as `ForkedCompilation.ask` does."""
    kind, answer = bytes(received[1:2]), bytes(memoryview(received)[2:])
    if kind == expected:
        return answer
    if kind == b"":
        raise ValueError("compiling it ended the compiler: it takes too much time or memory")
    text = msgspec.msgpack.decode(answer, type=str)
    if kind == FAULT:
        raise BackendUnavailable(text)
    raise ValueError(text)

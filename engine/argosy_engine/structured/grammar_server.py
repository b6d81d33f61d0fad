"""Grammar server: the process that compiles grammars, and the engine core's client of it. The process is
`python -m argosy_engine.structured.grammar_server FD PARENT`.

The server imports XGrammar and reads the vocabulary once, then forks for each grammar. It is a fork server (`osproc`)
and ends with the engine core, because the socket between them closes and because the kernel kills it. FD is that
socket, PARENT the argument of `die_with_parent`.

The core sends `GrammarServerArgs` over the server's stream socket, and over a job's socket a `CompileJob` and nothing
more, except perhaps `LOWER_PRIORITY`; closing the socket ends the compilation. The forked process replies with
`STARTED`, one byte for the kind of answer, and the answer in msgpack. Both structs are preceded by their length
(`framed`).

A server that does not fork in time, because it is stopped or hangs in the kernel, is killed and replaced. Wall clock
time decides, because such a process uses no CPU time. If a server is lost, the next one compiles the grammar again,
once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from argosy_engine.osproc import (
    ForkedJob,
    SpawnerThread,
    fork_for_jobs,
    framed,
    limit_memory,
    receive_framed,
    run_fork_server,
    start_fork_server,
)
from argosy_engine.structured import compile_queue
from argosy_engine.structured.compile_queue import BackendUnavailable, Grammar
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from argosy_engine.structured.xgrammar_backend import (
    Deserializer,
    Serialized,
    TokenTable,
    Vocabulary,
    XGrammarBackend,
    check_steps,
)

STARTED = b"S"
COMPILED = b"C"
"""Answer: the grammar, as `Serialized`."""
TABLE = b"T"
"""Answer: the vocabulary, as `TokenTable`."""
INVALID = b"I"
"""Answer: what is wrong with the grammar, as a string."""
FAULT = b"F"
"""Answer: why no grammar can be compiled, as a string."""

LOWER_PRIORITY = b"N"


class GrammarServerArgs(Struct, frozen=True):
    model_path: str
    vocab_size: int
    eos_token_ids: list[int]
    num_threads: int
    """Native threads per compilation."""


class CompileJob(Struct, frozen=True):
    deadline_s: float
    """Seconds after which the kernel kills the compilation."""
    spec: GrammarSpec | None = None
    """None asks for the `TokenTable`."""


logger = logging.getLogger("argosy.structured")

MAX_MEMORY_BYTES = 2 << 30
"""Memory limit of one compilation, beyond what the process has at its start. A large tool catalogue takes 200 MB."""
BRISK_S = 0.2
"""How long a compilation runs at the engine's own priority. Most take milliseconds, and at a low priority even these
would wait for seconds beside an engine that computes on all cores."""
NICENESS = 10
"""Niceness after `BRISK_S`."""
_LONG_NICENESS = 13
"""Niceness of a long compilation, which gets half the CPU share of a shorter one. Not the lowest priority: if the
engine computes on all cores, the compilation would hardly run, and a large schema would miss its deadline."""


def main() -> None:
    run_fork_server("argosy engine grammar server", serve)


def serve(control: socket.socket) -> None:
    """Read the vocabulary, and fork for each job until the other end of the socket is closed."""
    args = msgspec.msgpack.decode(receive_framed(control), type=GrammarServerArgs)
    backend = XGrammarBackend(
        lambda: Vocabulary(Path(args.model_path), args.vocab_size, args.eos_token_ids), args.num_threads
    )
    fault = None
    try:
        backend.warm_up()
    except Exception as error:  # the answer to every job
        logger.exception("grammars cannot be compiled")
        fault = str(error)
    fork_for_jobs(
        control, lambda job: _work(job, backend, fault), lambda job, reason: _answer(job, FAULT, reason)
    )


def _work(socket_: socket.socket, backend: XGrammarBackend, fault: str | None) -> None:
    """Run one job in a forked process: receive, compile, answer."""
    job = msgspec.msgpack.decode(receive_framed(socket_), type=CompileJob)
    # SIGALRM's default action kills the process without needing the interpreter.
    signal.setitimer(signal.ITIMER_REAL, job.deadline_s)
    limit_memory(MAX_MEMORY_BYTES)
    socket_.sendall(STARTED)
    threading.Thread(target=_obey, args=(socket_,), daemon=True).start()
    kind, answer = _result(job, backend, fault)
    with contextlib.suppress(OSError):
        _answer(socket_, kind, answer)


def _result(
    job: CompileJob, backend: XGrammarBackend, fault: str | None
) -> tuple[bytes, Serialized | TokenTable | str]:
    if fault is not None:
        return FAULT, fault
    try:
        if job.spec is None:
            return TABLE, backend.prepare()
        grammar = backend.compile(job.spec)
        check_steps(grammar, backend.token_lengths())
        return COMPILED, backend.serialized(job.spec, grammar)
    except (RuntimeError, ValueError, TypeError) as error:
        return INVALID, str(error)
    except MemoryError:
        return INVALID, f"compiling it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"


def _obey(job: socket.socket) -> None:
    """Lower the priority after a while and on request, and end the process when the core closes the job's socket.

    Runs in a thread, beside the native code.
    """
    if not select.select([job], [], [], BRISK_S)[0]:
        _set_niceness(NICENESS)
    while command := job.recv(1):
        if command == LOWER_PRIORITY:
            _set_niceness(_LONG_NICENESS)
    os._exit(1)


def _set_niceness(niceness: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def _answer(job: socket.socket, kind: bytes, answer: Serialized | TokenTable | str) -> None:
    job.sendall(kind + msgspec.msgpack.encode(answer))


MAX_ANSWER_BYTES = 68 << 20
"""Maximum size of a compiled grammar as text. A schema of 60 patterns over 100k tokens takes 67 MB, one of 40 optional
fields with lists of objects 69 MB. To read it takes fifteen times as much memory for a
moment, and holds the interpreter for 0.8 ms per MiB: 56 ms at most."""
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
        self._process, self._control = start_fork_server("argosy_engine.structured.grammar_server")
        self._control.setblocking(False)  # its buffer holds more jobs than there can be
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
    """Client of the fork server, which it starts and replaces: a `compile_queue.Backend`. Thread-safe.

    The process is started with the first grammar, or by `warm_up` once the engine is idle, and again with the next
    grammar after it has ended for whatever reason. Whichever thread needs it, a `SpawnerThread` starts it: compile
    threads end before it does.

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


class _Connection(ForkedJob):
    """The client's end of one job, with its fork server. Thread-safe."""

    def __init__(self, server: _ForkServer, connection: socket.socket) -> None:
        super().__init__(connection)
        self.server = server
        self._is_asked = self._is_lowered = False

    def await_fork(self, timeout_s: float) -> None:
        super().await_fork(timeout_s)
        self.server.is_warm = True

    def ask(self, question: CompileJob) -> None:
        """Send the job. Raises OSError if the process has ended."""
        self.socket.sendall(framed(msgspec.msgpack.encode(question)))
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
                self.socket.send(LOWER_PRIORITY, socket.MSG_DONTWAIT)


class ForkedCompilation:
    """Compilation of one grammar in a forked process."""

    def __init__(self, client: GrammarClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._connection = client.connect()
        self._is_killed = self._is_lowered = False

    def run(self, spec: GrammarSpec) -> Grammar:
        """Compile the grammar. Blocks; see `compile_queue.Compilation`."""
        answer = self.ask(CompileJob(self._client.deadline_s, spec), COMPILED)
        grammar = self._client.deserializer().grammar(answer)
        return grammar._replace(num_bytes=grammar.num_bytes + len(spec.text))

    def ask(self, question: CompileJob, expected: bytes) -> memoryview:
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

    def _ask(self, question: CompileJob, expected: bytes) -> memoryview:
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
                connection.socket.settimeout(max(give_up_at - time.monotonic(), 0.001))
                chunk = connection.socket.recv(1 << 20)
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


def _content(received: bytearray, expected: bytes) -> memoryview:
    """Return the answer after `STARTED` if it is of the expected kind. Raises as `ForkedCompilation.ask` does."""
    kind, answer = bytes(received[1:2]), memoryview(received)[2:]
    if kind == expected:
        return answer
    if kind == b"":
        raise ValueError("compiling it ended the compiler: it takes too much time or memory")
    text = msgspec.msgpack.decode(answer, type=str)
    if kind == FAULT:
        raise BackendUnavailable(text)
    raise ValueError(text)


if __name__ == "__main__":
    main()

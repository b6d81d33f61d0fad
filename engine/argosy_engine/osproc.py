"""Processes of the operating system, for every program of the engine: children, signals, descriptors, shared numbers.

Children end with the process that started them, however it ends. Two mechanisms are combined, because each has a gap. A
pipe or socket from the parent reports its end as end of file, but a stopped child (SIGSTOP) never reads it.
PR_SET_PDEATHSIG kills even a stopped child, but is tied to the *thread* that forked it, so it is requested only if that
is the parent's main thread or a `SpawnerThread`.

On SIGUSR1 a process writes the stacks of all threads and a description of its state to standard error. The signal
handler itself, in C, writes the stacks, so a process that hangs writes them too. A separate thread writes the
description, because the main thread may be the one that hangs. A process that may have no other thread writes its name
at least.

A fork server does its imports once and then forks for each job. A job is thus a process that starts within
milliseconds, can be killed at any time, has a limit of memory, and affects nothing else if native code crashes. The
server has one thread and does nothing but fork. Its client sends it single bytes, each with the socket of a job. Over
that the server sends `FORKED` with the fork's pidfd, by which the client can kill a fork that is stopped; all else is
between client and fork.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import logging
import mmap
import os
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from argosy_engine.errors import ConfigError

logger = logging.getLogger("argosy.core")

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1

EXIT_TIMEOUT_S = 5.0
"""How long a child may take to exit after its pipe or socket is closed, before it is killed."""
KILL_TIMEOUT_S = 5.0
"""How long a killed child may take to end. It may hang in an uninterruptible system call, of a device's driver or of a
network file system, and must not hold up its parent then."""


class SpawnerThread(threading.Thread):
    """Thread that starts children on behalf of threads that may end before them. The kernel kills them when it ends.

    It starts with the first call. Only one thread at a time may use it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def call(self, start: Callable[[], T]) -> T:
        """Run a function in the thread and return its result, or raise its exception.

        Raises:
            RuntimeError: the system has no more threads.
        """
        if not self.is_alive():
            self.start()
        result: Future[T] = Future()

        def answer() -> None:
            try:
                result.set_result(start())
            except BaseException as error:
                result.set_exception(error)

        self._calls.put(answer)
        return result.result()

    def close(self) -> None:
        """End the thread. Its children must have ended; others are killed."""
        self._calls.put(None)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it refers to the result, which its owner may want to release


def parent_argument() -> str:
    """Return the argument for a child's `die_with_parent`: our pid, or 0 if the calling thread may end before us."""
    thread = threading.current_thread()
    is_permanent = thread is threading.main_thread() or isinstance(thread, SpawnerThread)
    return str(os.getpid() if is_permanent else 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Does nothing if `parent` is 0.

    Args:
        parent: value of `parent_argument` in the parent.
    """
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def end_child(process: subprocess.Popen[bytes], name: str, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
    """Wait for a child that was told to exit, and kill it if it does not. Blocks for a bounded time.

    Args:
        name: what the log calls the child.
        timeout_s: how long it may take to exit.

    Returns whether it has ended. If not, the kernel ends it once its system call returns.
    """
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        logger.warning("%s, process %d, has not exited within %g s: killing it", name, process.pid, timeout_s)
    process.kill()
    try:
        process.wait(KILL_TIMEOUT_S)
        return True
    except subprocess.TimeoutExpired:
        logger.error(
            "%s, process %d, has not ended %g s after SIGKILL: giving it up",
            name,
            process.pid,
            KILL_TIMEOUT_S,
        )
        return False


def describe_exit(code: int | None) -> str:
    """Describe an exit code of `subprocess`: `exit code 1`, or `killed by SIGTERM`."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:  # the system's answer to a lack of memory
        return "killed by SIGKILL, maybe for lack of memory"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None if the system has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """Wait until some descriptors have data or are closed, and return them; empty after the timeout."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the garbage collector from running inside the block.

    The import of torch makes 180,000 objects, almost all of which stay. The collector would run 420 times meanwhile,
    for a tenth of the time that the import takes. Do not load weights inside.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def dump_stacks_on_signal(program: str = "") -> None:
    """Dump stacks on SIGUSR1, which kills the process by default. Call it as early as possible, in the main thread.

    The signal is unblocked, because a process inherits what the thread that started it has blocked.

    Args:
        program: name to write after the stacks, for a process that does not call `describe_on_signal`. It is written
            once the main thread runs Python code.
    """

    def name(*_: object) -> None:
        os.write(2, f"{program}, process {os.getpid()}: its stacks are above\n".encode())

    signal.signal(signal.SIGUSR1, name if program else signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, chain=bool(program))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def describe_on_signal(program: str, describe: Callable[[], str]) -> None:
    """Log a description on SIGUSR1, besides the stacks. Call it in the main thread.

    Args:
        program: name of the program and its role; begins the description, together with the process id.
        describe: called in another thread; exceptions are logged.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, chain=True)
    threading.Thread(
        target=_describe, args=(read_end, program, describe), daemon=True, name="diagnostics"
    ).start()


def _describe(read_end: int, program: str, describe: Callable[[], str]) -> None:
    while os.read(read_end, 4096):
        try:
            logger.warning("%s, process %d: %s", program, os.getpid(), describe())
        except Exception:
            logger.exception("the state could not be described")


MIN_FREE_DESCRIPTORS = 32
"""A client opens about 15 for its core: sockets, pipes, epoll and event descriptors."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard limit, for this process and those that it starts; return the limit.

    The usual soft limit of 1024 exists only for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def require_free_descriptors(count: int = MIN_FREE_DESCRIPTORS) -> None:
    """Check that this process can open `count` more files.

    libzmq aborts the process (SIGABRT) when it cannot open an epoll instance or accept a connection, so a shortage must
    be detected beforehand.

    Raises:
        ConfigError: it cannot.
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(count))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(
            f"{error.strerror}: an engine needs {count} free file descriptors, and {len(opened)} of this process's "
            f"{limit} are; raise the limit (ulimit -n)"
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)


_BYTES = 8


class SharedCounters:
    """Numbers that the processes of one program keep for each other, in memory that all of them have; all 0 at first.

    Each process has a row that only it writes, so that no lock is needed; a number is 8 bytes, which processors read
    and write as a whole. Whoever reads sums over the rows. The sum of several numbers that change at once may be one of
    no moment, so limits on it can be exceeded by what the processes admit within the same microseconds.

    Args:
        descriptor: of `make_shared_memory`; not kept, and not closed.
        num_processes: number of rows.
        index: row of this process.
        num_columns: numbers of each process.
    """

    def __init__(self, descriptor: int, num_processes: int, index: int, num_columns: int) -> None:
        memory = mmap.mmap(descriptor, num_processes * num_columns * _BYTES)
        self._numbers = memoryview(memory).cast("q")
        self._own = index * num_columns
        self._others = [row * num_columns for row in range(num_processes) if row != index]

    def after(self, num_columns: int) -> SharedCounters:
        """Return the same numbers without the first columns, for another owner."""
        part = copy.copy(self)
        part._own = self._own + num_columns
        part._others = [start + num_columns for start in self._others]
        return part

    def set(self, column: int, value: int) -> None:
        """Publish a number of this process."""
        self._numbers[self._own + column] = value

    def others(self, column: int) -> int:
        """Return the sum of a number over the other processes."""
        return sum(self._numbers[row + column] for row in self._others)


def make_shared_memory(num_processes: int, num_columns: int) -> int:
    """Return the descriptor of a memory without a name, which processes that inherit it share. The caller closes it."""
    size = num_processes * num_columns * _BYTES
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("argosy-counters")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


FORKED = b"P"
"""Sent by a fork server over a job's socket, with a pidfd of the fork if the kernel supports pidfds."""


def run_fork_server(name: str, serve: Callable[[socket.socket], None]) -> None:
    """Be the main function of a fork server, which `start_fork_server` has started.

    Args:
        name: of the program, for what it writes on SIGUSR1.
        serve: is given the server's socket; calls `fork_for_jobs` once it is ready.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    dump_stacks_on_signal(name)
    # Ctrl-C goes to the whole process group, but the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    fd, parent = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent)
    serve(socket.socket(fileno=fd))


def fork_for_jobs(
    control: socket.socket,
    work: Callable[[socket.socket], None],
    refuse: Callable[[socket.socket, str], None],
) -> None:
    """Fork for each job until the other end of the socket is closed.

    Args:
        work: runs a job in its fork, given the job's socket.
        refuse: tells the client of a job that the system cannot fork.
    """
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for fd in fds:
            with socket.socket(fileno=fd) as job:
                _fork(job, control, parent, work, refuse)


def _fork(
    job: socket.socket,
    control: socket.socket,
    parent: int,
    work: Callable[[socket.socket], None],
    refuse: Callable[[socket.socket, str], None],
) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        with suppress(OSError):
            refuse(job, str(error))
        return
    if pid == 0:
        code = 1
        try:
            control.close()
            die_with_parent(parent)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # If the system runs out of memory, the kernel should kill this process first.
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")
            work(job)
            code = 0
        finally:
            os._exit(code)
    pidfd = open_pidfd(pid)
    with suppress(OSError):  # the job was cancelled
        socket.send_fds(job, [FORKED], [] if pidfd is None else [pidfd])
    if pidfd is not None:
        os.close(pidfd)


def limit_memory(max_bytes: int) -> None:
    """Limit the memory of this process to so much more than it has."""
    # Limit private writable memory, not address space, of which each native thread reserves much without using it.
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def framed(payload: bytes) -> bytes:
    """Prefix a message with its length (4 bytes, little endian)."""
    return len(payload).to_bytes(4, "little") + payload


def receive_framed(connection: socket.socket) -> bytes:
    """Receive a message that is preceded by its length. Ends the process if the other end is closed."""
    return receive_exactly(connection, int.from_bytes(receive_exactly(connection, 4), "little"))


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive so many bytes. Ends the process if the other end is closed."""
    received = bytearray(size)
    view = memoryview(received)
    done = 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            sys.exit(0)
        done += count
    return bytes(received)


def start_fork_server(module: str, **environment: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server, whose main function is `run_fork_server`; return it, and the socket to it.

    Args:
        module: of its main function.
        environment: variables of it besides this process' own.

    Raises:
        OSError: it cannot be started.
    """
    control, theirs = socket.socketpair()
    safe_path = ["-P"] if sys.flags.safe_path else []
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [sys.executable, *safe_path, "-m", module, str(theirs.fileno()), parent_argument()],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # The server must have one thread only, because it forks.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **environment},
            )
    except BaseException:
        control.close()
        raise
    return process, control


class ForkedJob:
    """The client's end of one job of a fork server, with its fork. Other threads may kill it.

    Args:
        connection: the job's socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lock = threading.Lock()
        self._pidfd: int | None = None
        self._is_closed = False

    def await_fork(self, timeout_s: float) -> None:
        """Wait until the server has forked for this job.

        Raises:
            TimeoutError: the server did not fork in time.
            EOFError: the server or the job has ended.
            OSError: as EOFError.
        """
        self.socket.settimeout(timeout_s)
        data, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
        with self._lock:
            if fds and self._is_closed:
                os.close(fds[0])
            elif fds:
                self._pidfd = fds[0]
        if data != FORKED:
            raise EOFError

    def kill(self) -> None:
        """End the job at once, even if its process is stopped. Reading and writing fail from then on."""
        with self._lock:
            if self._is_closed:
                return
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            self._kill_fork()

    def close(self) -> None:
        """Close the socket and kill the fork."""
        with self._lock:
            self._is_closed = True
            self._kill_fork()
            self.socket.close()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _kill_fork(self) -> None:
        if self._pidfd is not None:
            with suppress(OSError):  # it has ended already
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

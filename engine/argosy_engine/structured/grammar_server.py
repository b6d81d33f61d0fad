"""Fork server that compiles grammars: `python -m argosy_engine.structured.grammar_server FD PARENT`.

It imports XGrammar and reads the vocabulary once, then forks for each grammar. Each compilation is thus a process that
starts within milliseconds, can be killed at any time, has a memory limit, and affects nothing else if the native code
crashes. The server has one thread and does nothing but fork; it ends with the engine core. FD is the stream socket over
which it gets its jobs (`grammar_messages`), PARENT the argument of `die_with_parent`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from argosy_engine.osproc.child_process import die_with_parent, open_pidfd
from argosy_engine.osproc.debug_signal import dump_stacks_on_signal
from argosy_engine.structured.grammar_messages import (
    COMPILED,
    FAULT,
    FORKED,
    INVALID,
    LOWER_PRIORITY,
    STARTED,
    TABLE,
    CompileJob,
    GrammarServerArgs,
)
from argosy_engine.structured.step_probe import check_steps
from argosy_engine.structured.vocabulary import TokenTable, Vocabulary
from argosy_engine.structured.xgrammar_backend import Serialized, XGrammarBackend

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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    dump_stacks_on_signal("argosy engine grammar server")
    # Ctrl-C goes to the whole process group, but the core decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    fd, parent = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent)
    serve(socket.socket(fileno=fd))


def serve(control: socket.socket) -> None:
    """Fork for each job until the other end of the socket is closed."""
    args = msgspec.msgpack.decode(_receive(control), type=GrammarServerArgs)
    backend = XGrammarBackend(
        lambda: Vocabulary(Path(args.model_path), args.vocab_size, args.eos_token_ids), args.num_threads
    )
    fault = None
    try:
        backend.warm_up()
    except Exception as error:  # the answer to every job
        logger.exception("grammars cannot be compiled")
        fault = str(error)
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for fd in fds:
            with socket.socket(fileno=fd) as job:
                _fork(job, control, parent, backend, fault)


def _fork(
    job: socket.socket, control: socket.socket, parent: int, backend: XGrammarBackend, fault: str | None
) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        with contextlib.suppress(OSError):
            _answer(job, FAULT, str(error))
        return
    if pid == 0:
        code = 1
        try:
            control.close()
            die_with_parent(parent)
            _work(job, backend, fault)
            code = 0
        finally:
            os._exit(code)
    pidfd = open_pidfd(pid)
    with contextlib.suppress(OSError):  # the job was cancelled
        socket.send_fds(job, [FORKED], [] if pidfd is None else [pidfd])
    if pidfd is not None:
        os.close(pidfd)


def _work(socket_: socket.socket, backend: XGrammarBackend, fault: str | None) -> None:
    """Run one job in a forked process: receive, compile, answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # If the system runs out of memory, the kernel should kill this process first.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    job = msgspec.msgpack.decode(_receive(socket_), type=CompileJob)
    # SIGALRM's default action kills the process without needing the interpreter.
    signal.setitimer(signal.ITIMER_REAL, job.deadline_s)
    _limit_memory()
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


def _receive(connection: socket.socket) -> bytes:
    """Receive a framed message. Ends the process if the other end is closed."""
    return _receive_exactly(connection, int.from_bytes(_receive_exactly(connection, 4), "little"))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:  # a signal may cut MSG_WAITALL short
        part = connection.recv(size - len(received), socket.MSG_WAITALL)
        if not part:
            sys.exit(0)
        received += part
    return received


def _limit_memory() -> None:
    # Limit private writable memory, not address space, of which each native thread reserves much without using it.
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


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


if __name__ == "__main__":
    main()

"""The grammar process: its results, and what happens when it or its client ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.structured import compile_queue
from argosy_engine.structured.compile_queue import BackendUnavailable
from argosy_engine.structured.grammar_server import (
    NICENESS,
    ForkedCompilation,
    GrammarClient,
    GrammarServerArgs,
)
from argosy_engine.structured.grammar_state import GrammarState
from argosy_engine.structured.structured_outputs_params import GrammarSpec, StructuredOutputsParams
from processes import wait_until

EOS = 2
ARGS = GrammarServerArgs(str(resolve_model("builtin://tiny")), 1024, [EOS], 1)
ENDLESS = GrammarSpec("regex", "(a|aa|aaa)*" * 2000)
"""Takes minutes; requests never get this far with it."""


@pytest.fixture(scope="module")
def shared_client() -> Iterator[GrammarClient]:
    made = GrammarClient(ARGS)
    yield made
    made.close()


@pytest.fixture
def client(shared_client: GrammarClient) -> GrammarClient:
    """Without the processes of earlier compilations: one gives its result before it ends, and may take its time."""
    pid = shared_client.pid
    if pid is not None:
        wait_until(lambda: not children(pid), "the end of earlier compilations")
    return shared_client


def compiled(client: GrammarClient, kind: Any, text: str) -> Any:
    return client.new_compilation().run(GrammarSpec(kind, text))


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended


def wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(pidfd):
        assert select.select([pidfd], [], [], 60)[0], "it lives on"


def begin(compilation: ForkedCompilation) -> Future[Any]:
    executor = ThreadPoolExecutor(1)
    future = executor.submit(compilation.run, ENDLESS)
    executor.shutdown(wait=False)
    return future


def num_threads(pid: int) -> int:
    """0 for a process that has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def child_of(client: GrammarClient) -> int:
    """The forked process that compiles now; it has begun when it has a second thread."""
    pid, deadline = client.pid, threading.Event()
    assert pid is not None
    timer = threading.Timer(90, deadline.set)
    timer.start()
    while not (found := [child for child in children(pid) if num_threads(child) > 1]):
        assert not deadline.is_set(), "nothing was forked"
    timer.cancel()
    return found[0]


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputsParams(json={"type": "object"}).spec(),
        StructuredOutputsParams(json={"type": "string", "maxLength": 8}).spec(),
        StructuredOutputsParams(regex="[0-9]{3}").spec(),
        StructuredOutputsParams(choice=("red", "green")).spec(),
        StructuredOutputsParams(structural_tag={"format": {"type": "any_text"}}).spec(),
    ],
    ids=["json", "bounded string", "regex", "choice", "structural tag"],
)
def test_grammars_are_the_same_as_those_compiled_here(client: GrammarClient, spec: GrammarSpec) -> None:
    from argosy_engine.structured.xgrammar_backend import Vocabulary, XGrammarBackend

    here = XGrammarBackend(lambda: Vocabulary(Path(ARGS.model_path), 1024, (EOS,)), 1).compile(spec)
    masks = []
    for grammar in (here, client.new_compilation().run(spec).compiled):
        mask = np.zeros((1, 32), np.int32)
        GrammarState(grammar, None, (EOS,)).fill(mask, 0)
        masks.append(mask.tobytes())
    assert masks[0] == masks[1]


def test_a_compile_error_is_reported_and_the_process_continues(client: GrammarClient) -> None:
    with pytest.raises(ValueError, match="not defined"):
        compiled(client, "grammar", "root ::= missing")
    assert compiled(client, "regex", "a") is not None


def test_a_killed_compilation_ends_at_once(client: GrammarClient) -> None:
    compilation = client.new_compilation()
    running = begin(compilation)
    child = child_of(client)
    compilation.lower_priority()
    compilation.kill()
    wait_for_end(child)
    assert running.exception(30) is not None
    assert compiled(client, "regex", "b") is not None


def test_a_compilation_whose_priority_is_lowered_before_it_begins_runs(client: GrammarClient) -> None:
    """As that of the first grammar, when the process takes long to start."""
    compilation = client.new_compilation()
    compilation.lower_priority()
    assert compilation.run(GrammarSpec("regex", "j")) is not None


def test_a_compilation_that_takes_long_makes_way_for_the_engine(client: GrammarClient) -> None:
    compilation = client.new_compilation()
    running = begin(compilation)
    child = child_of(client)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, child) == NICENESS, "a lower priority")
    compilation.kill()
    with pytest.raises(BackendUnavailable):
        running.result(30)


def test_a_compilation_killed_before_it_begins_never_runs(client: GrammarClient) -> None:
    compilation = client.new_compilation()
    compilation.kill()
    with pytest.raises(BackendUnavailable):
        compilation.run(GrammarSpec("regex", "a"))


def test_the_kernel_kills_an_orphaned_grammar_process() -> None:
    client = GrammarClient(ARGS, deadline_s=1.0)
    try:
        with pytest.raises(ValueError, match="too much time or memory"):
            client.new_compilation().run(ENDLESS)
    finally:
        client.close()


def test_a_crash_in_native_code_fails_its_grammar_only(client: GrammarClient) -> None:
    running = begin(client.new_compilation())
    os.kill(child_of(client), signal.SIGSEGV)
    assert isinstance(running.exception(30), ValueError)
    assert compiled(client, "regex", "c") is not None


def test_the_process_is_started_again_after_its_end(client: GrammarClient) -> None:
    assert compiled(client, "regex", "d") is not None
    before = client.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_for_end(before)
    assert compiled(client, "regex", "e") is not None
    assert client.pid != before


def test_a_warm_client_compiles_with_the_process_it_has_started() -> None:
    client = GrammarClient(ARGS)
    client.warm_up()
    warmed = client.pid
    assert warmed is not None
    assert compiled(client, "regex", "a|b")
    assert client.pid == warmed
    client.close()


def test_a_closed_client_starts_no_process() -> None:
    client = GrammarClient(ARGS)
    client.close()
    with pytest.raises(BackendUnavailable, match="shutting down"):
        client.warm_up()
    with pytest.raises(OSError, match="shutting down"):
        client.new_compilation()
    assert client.pid is None


def test_closing_does_not_wait_for_a_process_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped here. One that imports XGrammar reads nothing for seconds, on a busy machine."""
    monkeypatch.setattr("argosy_engine.structured.grammar_server.EXIT_TIMEOUT_S", 600.0)
    client = GrammarClient(ARGS)
    compilation = client.new_compilation()
    pid = client.pid
    assert pid is not None
    stop(pid)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    wait_for_end(pid)
    closing.join()
    with pytest.raises(BackendUnavailable):
        compilation.run(GrammarSpec("regex", "a"))


def test_a_vocabulary_that_cannot_be_fetched_is_no_fault_of_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer is too long here; the system may also kill the fork that reads it, for lack of memory."""
    fresh = GrammarClient(ARGS)
    try:
        monkeypatch.setattr("argosy_engine.structured.grammar_server.MAX_ANSWER_BYTES", 2000)
        for fetch in (fresh.warm_up, lambda: compiled(fresh, "regex", "a")):
            with pytest.raises(BackendUnavailable, match="vocabulary"):
                fetch()
        monkeypatch.undo()
        assert compiled(fresh, "regex", "a") is not None
    finally:
        fresh.close()


def test_an_unreadable_vocabulary_is_reported(tmp_path: Path) -> None:
    client = GrammarClient(GrammarServerArgs(str(tmp_path), 1024, [EOS], 1))
    try:
        with pytest.raises(BackendUnavailable, match="vocabulary"):
            compiled(client, "regex", "a")
    finally:
        client.close()


PARENT = """
import sys, threading
from argosy_engine.structured.grammar_server import GrammarClient
from argosy_engine.structured.grammar_server import GrammarServerArgs
from argosy_engine.structured.compile_queue import CompileQueue
from argosy_engine.structured.structured_outputs_params import GrammarSpec
client = GrammarClient(GrammarServerArgs(sys.argv[1], 1024, [2], 1))
def start_and_compile():
    client.new_compilation().run(GrammarSpec("regex", "a"))
match sys.argv[2]:
    case "main thread":
        start_and_compile()
    case "thread that ends":
        thread = threading.Thread(target=start_and_compile)
        thread.start()
        thread.join()
    case "warm-up":
        CompileQueue(client, num_threads=1).warm_up()
        while client.pid is None:
            pass
endless = GrammarSpec("regex", "(a|aa|aaa)*" * 2000)
threading.Thread(target=client.new_compilation().run, args=(endless,), daemon=True).start()
print(client.pid, flush=True)
sys.stdin.read()
"""


STOPPED, RUNNING = "stopped", "running"


@pytest.mark.parametrize(
    ("started_by", "state"),
    [
        ("main thread", RUNNING),
        ("thread that ends", STOPPED),
        ("warm-up", RUNNING),
        *(
            pytest.param(started_by, state, marks=pytest.mark.full)
            for started_by, state in (
                ("main thread", STOPPED),
                ("thread that ends", RUNNING),
                ("warm-up", STOPPED),
            )
        ),
    ],
)
def test_nothing_outlives_a_killed_core(started_by: str, state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, ARGS.model_path, started_by],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        while not (forked := children(pid)):
            pass
        if state == STOPPED:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    for ended in (pid, *forked):
        wait_for_end(ended)


def test_neither_torch_nor_transformers_are_loaded_for_grammars() -> None:
    code = (
        "import sys\n"
        "from argosy_engine.structured.xgrammar_backend import import_xgrammar\n"
        "import_xgrammar()\n"
        "from argosy_engine.structured.structured_outputs_params import GrammarSpec\n"
        "from argosy_engine.structured.xgrammar_backend import Vocabulary\n"
        "from argosy_engine.structured.xgrammar_backend import XGrammarBackend\n"
        "from argosy_engine.structured.xgrammar_backend import check_steps\n"
        "from pathlib import Path\n"
        "backend = XGrammarBackend(lambda: Vocabulary(Path(sys.argv[1]), 1024, (2,)), 1)\n"
        "check_steps(backend.compile(GrammarSpec('regex', '[a-z]+')), backend.token_lengths())\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, ARGS.model_path], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]], ids=["default", "faulthandler"])
def test_the_import_of_xgrammar_leaves_crashes_to_their_handler(options: list[str]) -> None:
    """A library below it brings a handler of its own, which may wait for ever for a lock of the code that crashed."""
    code = (
        "import os, signal\n"
        "from argosy_engine.structured.xgrammar_backend import import_xgrammar\n"
        "import_xgrammar()\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    run = subprocess.run([sys.executable, *options, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == -signal.SIGSEGV
    assert "Segfault encountered" not in run.stderr
    assert ("Fatal Python error: Segmentation fault" in run.stderr) == bool(options)


def test_a_grammar_whose_steps_take_too_long_is_refused() -> None:
    """With each reading of the CPU clock a tenth of a second later than usual."""
    from argosy_engine.structured.xgrammar_backend import (
        MAX_STEP_S,
        TooSlow,
        Vocabulary,
        XGrammarBackend,
        check_steps,
    )

    backend = XGrammarBackend(lambda: Vocabulary(Path(ARGS.model_path), 1024, (EOS,)), 1)
    grammar = backend.compile(GrammarSpec("regex", "[a-z]+ [0-9]{3}"))
    now = 0.0

    def clock(step_s: float) -> float:
        nonlocal now
        now += step_s
        return now

    check_steps(grammar, backend.token_lengths(), lambda: clock(MAX_STEP_S / 100))
    with pytest.raises(TooSlow, match="less ambiguous"):
        check_steps(grammar, backend.token_lengths(), lambda: clock(MAX_STEP_S * 1.01))


class Impatient(GrammarClient):
    """Once told so, replaces a process that does not fork within half a second, and is patient with the next one."""

    def stop(self, pid: int) -> None:
        stop(pid)
        self.fork_timeout_s = 0.5

    def replace(self, server: Any) -> None:
        self.fork_timeout_s = 600.0
        super().replace(server)


@pytest.fixture
def impatient() -> Iterator[Impatient]:
    made = Impatient(ARGS)
    yield made
    made.close()


def stop(pid: int) -> None:
    """By SIGSTOP: as a process that hangs in the kernel, it reads nothing and its timers do nothing."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        pass


def test_a_stopped_process_is_replaced_and_the_grammar_compiled_by_the_next(
    impatient: Impatient,
) -> None:
    assert compiled(impatient, "regex", "f") is not None
    before = impatient.pid
    assert before is not None
    impatient.stop(before)
    assert compiled(impatient, "regex", "g") is not None
    assert impatient.pid != before
    wait_for_end(before)


def test_a_process_stopped_before_it_is_warm_is_replaced() -> None:
    client = GrammarClient(ARGS, fork_timeout_s=0.5, warm_up_timeout_s=0.5)
    try:
        compilation = client.new_compilation()
        assert client.pid is not None
        stop(client.pid)
        before = client.pid
        with contextlib.suppress(BackendUnavailable):  # half a second may be too short for the next one, too
            compilation.run(GrammarSpec("regex", "a"))
        assert client.pid != before
        wait_for_end(before)
    finally:
        client.close()


def test_a_compilation_that_fell_with_its_process_is_begun_anew(impatient: Impatient) -> None:
    compilation = impatient.new_compilation()
    running = begin(compilation)
    first, before = child_of(impatient), impatient.pid
    assert before is not None
    impatient.stop(before)
    assert compiled(impatient, "regex", "h") is not None
    wait_for_end(first)
    assert impatient.pid != before
    second = child_of(impatient)
    assert not running.done()
    compilation.kill()
    wait_for_end(second)
    assert isinstance(running.exception(30), BackendUnavailable)


def test_a_stopped_compilation_is_killed_with_its_request(client: GrammarClient) -> None:
    compilation = client.new_compilation()
    running = begin(compilation)
    child = child_of(client)
    stop(child)
    compilation.kill()
    assert running.exception(30) is not None
    wait_for_end(child)


def test_a_stopped_compilation_is_given_up_soon_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    client = GrammarClient(ARGS, deadline_s=3.0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(compile_queue, "PATIENCE", 1.0)
            running = begin(client.new_compilation())
            child = child_of(client)
            stop(child)
            assert isinstance(running.exception(30), BackendUnavailable)
        wait_for_end(child)
        assert compiled(client, "regex", "i") is not None
    finally:
        client.close()

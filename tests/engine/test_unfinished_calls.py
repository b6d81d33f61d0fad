"""Groups left while a call is unfinished are kept until it ends, and no thread is inside torch at the program's end."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any, cast

from argosy_engine.distributed import engine_copies
from argosy_engine.distributed.engine_copies import keep_until_finished

PROGRAM = """
import atexit, threading

num_looks = 0
looked = threading.Event()


@atexit.register  # handlers run in reverse order, so this one is the last
def check():
    before = num_looks
    looked.clear()
    print(looked.wait(0.3), before == num_looks, freed)


from argosy_engine.distributed import engine_copies

freed = []


class Group:
    def __del__(self):
        freed.append(self)


class Work:
    def is_completed(self):
        global num_looks
        num_looks += 1
        looked.set()


engine_copies.POLL_S = 0.001
engine_copies.keep_until_finished(Group(), Work())
assert looked.wait(60)
"""


class Group:
    def __init__(self) -> None:
        self.freed = threading.Event()

    def __del__(self) -> None:
        self.freed.set()


class Work:
    def __init__(self) -> None:
        self.looks, self.is_finished = threading.Semaphore(0), False

    def is_completed(self) -> bool:
        self.looks.release()
        return self.is_finished


def test_a_group_is_kept_until_its_call_has_ended(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_copies, "POLL_S", 0.001)
    group, work = Group(), Work()
    freed = group.freed
    keep_until_finished(cast(Any, group), cast(Any, work))
    del group
    for _ in range(3):
        assert work.looks.acquire(timeout=60)
    assert not freed.is_set()
    work.is_finished = True
    assert freed.wait(60)


def test_no_thread_looks_at_a_call_while_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False True []\n", "")

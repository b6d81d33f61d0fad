"""Groups that were left while a call on them was unfinished: gloo cannot abort one, and whoever destroys a group waits
for its calls. They end once the other processes have.

A thread keeps such a group. It must not be inside torch when the interpreter ends: torch takes the interpreter's lock
again in destructors, where an ending interpreter ends the thread, and with it, by `std::terminate`, the process.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

import torch.distributed as dist

POLL_S = 0.5

_exiting = threading.Event()
_unsettled: set[threading.Event] = set()


def keep_until_finished(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Keep a group until a call on it has ended, or for ever if the program ends before."""
    kept: list[Any] = [group, work]
    settled = threading.Event()

    def keep() -> None:
        while not kept[1].is_completed() and not _exiting.wait(POLL_S):
            pass
        if not _exiting.is_set():
            kept.clear()
        _unsettled.discard(settled)
        settled.set()
        if kept:
            threading.Event().wait()

    _unsettled.add(settled)
    threading.Thread(target=keep, name="unfinished call of copies", daemon=True).start()


@atexit.register
def _settle() -> None:
    _exiting.set()
    for settled in list(_unsettled):
        settled.wait()

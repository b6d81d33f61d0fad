"""StartWatch: ends an API process whose start hangs after its cores have loaded the model.

The client of the cores watches their loads (`core.proc.load_watch`), but not its own process: a read of a lost volume,
as of the tokenizer's file, blocks the event loop. Hence a thread, which needs the interpreter's lock: what reads files
during the start must give it up.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from types import TracebackType
from typing import Self

from argosy_engine.core.proc.load_watch import LoadWatch
from argosy_engine.messages.load_step import LoadStep

GRACE_S = 15.0
"""How long a start that has stalled may take to end in the usual way, which says more and leaves no files."""


class StartWatch:
    """Ends the process, with the stacks of its threads, if its start stalls within the context.

    The cores end with it, as with any end of their parent.

    Args:
        timeout_s: how long the start may be without progress; 0: for ever.
        exit_code: the process's.
    """

    def __init__(self, timeout_s: float, exit_code: int, grace_s: float = GRACE_S) -> None:
        self._watch = LoadWatch(timeout_s)
        self._exit_code = exit_code
        self._grace_s = grace_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="start watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def advanced(self, step: LoadStep) -> None:
        """Note that the start has advanced."""
        self._watch.advanced(step)

    def _run(self) -> None:
        while not self._ended.wait(self._watch.remaining_s):
            if self._watch.is_stalled and not self._ended.wait(self._grace_s) and self._watch.is_stalled:
                faulthandler.dump_traceback()
                print(f"argosy serve: {self._watch.stalled()}", file=sys.stderr, flush=True)
                os._exit(self._exit_code)

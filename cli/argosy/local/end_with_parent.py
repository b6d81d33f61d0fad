"""Run a command that ends with the process that started it.

    python end_with_parent.py PARENT_PID MORE_OOM_SCORE_ADJ COMMAND...

Owns: what is done before exec: prctl(PR_SET_PDEATHSIG, SIGKILL), so that even `kill -9` of the supervisor leaves no
engine behind, and how much sooner than the supervisor Linux kills the command when memory runs out. It is a separate
script, so that no Python code runs between fork and exec in a process that may hold locks; it must not import any of
our packages. Outside Linux it only runs the command.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, more_oom_score_adj, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            sys.exit(1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = min(1000, int(file.read()) + more_oom_score_adj)
            file.write(f"{score}")
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()

"""Runs a script of Python with several command lines, each in a fork of one process that has imported what takes long.

Such a run finds what an earlier one has written, and nothing that it had in memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def forked_script(script: Path, modules: Sequence[str]) -> Iterator[Callable[[Sequence[str]], int]]:
    """Give a function that runs the script with a command line and returns its exit code, until the block ends.

    Args:
        modules: what the script imports.
    """
    command = [sys.executable, "-P", __file__, str(script), *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(arguments: Sequence[str]) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(list(arguments)) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        try:
            yield run
        finally:
            process.stdin.close()


def _main() -> None:
    script, *modules = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            os.dup2(2, 1)
            sys.argv = [script, *json.loads(line)]
            runpy.run_path(script, run_name="__main__")
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _main()

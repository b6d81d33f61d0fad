"""Runs `argosy serve` with several command lines, each in a fork of one process that has imported the server.

For command lines that are refused: importing the server takes longer than that.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    returncode: int
    stderr: str


def serve_each(
    command_lines: Sequence[Sequence[str]],
    descriptors: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run each command line until it ends.

    Args:
        descriptors: limits on open files, one for each command line; empty: this process's.
        env: the whole environment; None: this process's.
    """
    todo = json.dumps([list(map(list, command_lines)), list(descriptors)])
    command = [sys.executable, "-P", __file__, todo]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240, env=env)
    return [Outcome(*each) for each in json.loads(done.stdout)]


def _main() -> int:
    from argosy_engine.api.serve import main

    command_lines, descriptors = json.loads(sys.argv[1])
    outcomes = []
    for index, arguments in enumerate(command_lines):
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            pid = os.fork()
            if pid == 0:
                os.dup2(errors.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                if descriptors:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors[index],) * 2)
                return main(arguments)
            _, status = os.waitpid(pid, 0)
            errors.seek(0)
            outcomes.append((os.waitstatus_to_exitcode(status), errors.read()))
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(_main())

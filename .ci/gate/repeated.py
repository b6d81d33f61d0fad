"""python -m gate.repeated [--times N] [--busy SHARE] [--tests FILES] [-- COMMAND ...]: run tests again and again.

Without files and command: the files of tests that changed since that last ran in `make full`. A command that runs
pytest with $(PYTEST_ARGS), as `make test` does, is counted test by test. Beside it one process for each processor keeps
that processor busy for a share of the time. Prints how often each test failed; exits 1 if any did.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gate import bases
from gate.outcomes import Outcomes
from gate.steps import recorded_name

ROOT = Path(__file__).resolve().parents[2]
BURST_S = 0.05
HOG = """
import os, sys, time
busy, idle, parent = float(sys.argv[1]), float(sys.argv[2]), os.getppid()
while os.getppid() == parent:
    until = time.monotonic() + busy
    while time.monotonic() < until:
        pass
    time.sleep(idle)
"""


@contextmanager
def busy_processors(share: float) -> Iterator[None]:
    """Keep each processor busy for this share of the time, in bursts of 50 ms, until the block ends."""
    idle = BURST_S * (1 - share) / share if share else 0.0
    command = [sys.executable, "-c", HOG, str(BURST_S), str(idle)]
    hogs = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)] if share else []
    try:
        yield
    finally:
        for hog in hogs:
            hog.terminate()
        for hog in hogs:
            hog.wait()


def changed_tests() -> list[str]:
    """Return the files of tests that changed since this last ran in `make full` (or since the last commit)."""
    base = bases.read_passed().get(recorded_name("repeated"), {}).get("commit")
    if base is None or not bases.is_ancestor(base, ROOT):
        base = "HEAD~1"
    paths = bases.changed_since(base, ROOT)
    return [
        path for path in paths
        if path.startswith("tests/") and Path(path).name.startswith("test_") and (ROOT / path).is_file()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="gate.repeated", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--busy", type=float, default=0.5, help="share of each processor taken by others")
    parser.add_argument("--tests", default="", help="files of tests, separated by spaces")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    arguments = parser.parse_args()
    if not 0 <= arguments.busy < 1 or arguments.times < 1:
        parser.error("--busy is a share from 0 to below 1, --times at least 1")
    report = ROOT / "build" / "gate" / "repeated.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    options = f"--junitxml={report} -o junit_family=xunit1"
    command = arguments.command
    if not command:
        if not (tests := arguments.tests.split() or changed_tests()):
            print("no file of tests has changed")
            return 0
        command = ["make", "--no-print-directory", "test", "LANES=full", f"TESTS={' '.join(tests)}"]
    failures: Counter[str] = Counter()
    bad_runs = 0
    with busy_processors(arguments.busy):
        for number in range(1, arguments.times + 1):
            report.unlink(missing_ok=True)
            started = time.monotonic()
            code = subprocess.run([*command, f"PYTEST_ARGS={options}"], check=False, cwd=ROOT).returncode
            try:
                outcomes = Outcomes.read(report)
            except (OSError, ElementTree.ParseError):
                outcomes = Outcomes()
            failures.update(outcomes.failed)
            bad_runs += code != 0
            load = os.getloadavg()[0]
            print(
                f"run {number}: {len(outcomes.passed)} passed, {len(outcomes.failed)} failed, exit {code}, "
                f"{time.monotonic() - started:.0f} s, load {load:.1f}", flush=True,
            )  # fmt: skip
    for test, count in failures.most_common():
        print(f"{count:4} of {arguments.times}  {test}")
    print(
        f"{bad_runs} of {arguments.times} runs failed, each processor {arguments.busy:.0%} busy with something else"
    )
    return bool(bad_runs)


if __name__ == "__main__":
    sys.exit(main())

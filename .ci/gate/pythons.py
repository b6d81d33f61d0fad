"""python -m gate.pythons NAME...: run the tests of every change on other Pythons, such as python3.12.

Each gets an environment of its own, build/pythons/NAME, from the gate's cache. An interpreter that is not installed is
named as not run, and the types are checked for its version instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from gate import environments

ROOT = Path(__file__).resolve().parents[2]
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"


def interpreter(name: str) -> str | None:
    """Return the path of an interpreter that runs, from $PATH or pyenv's versions; None if there is none."""
    version = name.removeprefix("python")
    found = [
        shutil.which(name),
        *(str(path) for path in sorted(PYENV.glob(f"{version}.*/bin/{name}"), reverse=True)),
    ]
    for path in found:
        if (
            path
            and subprocess.run([path, "-c", "import venv"], check=False, capture_output=True).returncode == 0
        ):
            return path
    return None


def main() -> int:
    failed = []
    for name in sys.argv[1:]:
        python = interpreter(name)
        if python is None:
            version = name.removeprefix("python")
            print(
                f"== {name}: not installed, its tests are NOT RUN; types are checked for {version}",
                flush=True,
            )
            command = [sys.executable, "-m", "mypy", f"--python-version={version}"]
        else:
            print(f"== {name}: {python}", flush=True)
            folder = ROOT / "build" / "pythons" / name
            folder.parent.mkdir(parents=True, exist_ok=True)
            environments.install_tests(ROOT, folder, python)
            parallel = ["--numprocesses", "2", "--dist", "loadfile", "--max-worker-restart", "0"]
            command = [
                str(folder / "bin" / "python"),
                "-P",
                "-m",
                "pytest",
                "tests",
                "--lanes",
                "units",
                *parallel,
            ]
        if subprocess.run(command, check=False, cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

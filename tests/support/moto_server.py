"""moto's S3 server for tests, in a virtual environment of its own, made once in a cache folder.

It cannot share ours: botocore needs python-dateutil 2, and kubernetes needs 3.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prepared_files import prepared_files
from processes import answers, free_port, wait_until

REQUIREMENTS = ("moto[s3]==5.2.5", "flask>=3", "flask-cors>=6")
INSTALL_TIMEOUT = 300.0
START_TIMEOUT = 240.0


class CannotInstall(Exception):
    """The package index is out of reach, or has no such packages."""


def prepare() -> Path:
    """Return the interpreter of the environment, made at the first call on a machine.

    `python -m moto_server` does so before tests begin.

    Raises:
        CannotInstall: pip has failed.
    """
    digest = hashlib.sha256(repr((REQUIREMENTS, sys.version)).encode()).hexdigest()[:12]
    folder = prepared_files() / f"moto-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    python, done = folder / "venv" / "bin" / "python", folder / "done"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test runs the second finds it installed
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
            command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            installed = subprocess.run(
                [*command, *REQUIREMENTS],
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT,
                check=False,
            )
            if installed.returncode:
                raise CannotInstall(f"moto cannot be installed: {installed.stderr[-300:]}")
            done.touch()
    return python


@contextmanager
def running_moto() -> Iterator[str]:
    """Run the server, and return its address. Skips where it cannot be installed."""
    try:
        python = prepare()
    except CannotInstall as error:
        pytest.skip(str(error))
    port = free_port()
    command = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{url}/moto-api/data.json"), "moto's server", START_TIMEOUT)
        yield url
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    print(prepare())

"""Programs for tests, built once from their Go modules into a cache folder.

A module's go.mod pins the version; `go get MODULE@VERSION && go mod tidy` there changes it. The folder of the binary is
named by a hash of the sources, so that a new version never meets an old binary.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from prepared_files import prepared_files

BUILD_TIMEOUT = 1800.0
"""Download and compilation: minutes, and more on a loaded machine."""
_USUAL_GO = Path("/usr/local/go/bin/go")


def find_go() -> str | None:
    """Return the path of the go command; None if there is none."""
    return shutil.which("go") or (str(_USUAL_GO) if _USUAL_GO.exists() else None)


def built_program(go: str, sources: Path, package: str = ".") -> Path:
    """Return the binary of a package of the module in `sources`, built at the first call on a machine."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = prepared_files() / f"{sources.name.replace('_', '-')}-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    binary = folder / sources.name
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test runs the second finds it built
        if not binary.exists():
            staging = folder / "staging"
            command = [
                *(go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"),
                *("-o", str(staging), package),
            ]
            done = subprocess.run(
                command,
                cwd=sources,
                env={**os.environ, "CGO_ENABLED": "0"},
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT,
                check=False,
            )
            assert done.returncode == 0, f"{' '.join(command)} in {sources}:\n{done.stderr[-4000:]}"
            staging.rename(binary)
    return binary

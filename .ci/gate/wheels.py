"""python -m gate.wheels FOLDER: build the wheel with the compiled router into a folder.

With ARGOSY_CI_CACHE set, a wheel of the same sources, Python and compiler is taken from there: compiling takes minutes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gate.environments import cache_folder

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "protocol", "fetcher", "operator", "engine", "router", "batch", "cli", "models", "build_hooks", "pyproject.toml",
    "README.md", "LICENSE",
)  # fmt: skip
"""What a wheel is made of."""


def key(root: Path) -> str:
    """Hash what decides the contents of a wheel: its sources in the working tree, Python and the compiler."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES],
        check=True, capture_output=True,
    ).stdout.split(b"\0")  # fmt: skip
    compiler = subprocess.run(["cc", "--version"], check=False, capture_output=True).stdout
    digest = hashlib.sha256(sys.version.encode() + compiler)
    for name in sorted({*listed} - {b""}):
        path = root / os.fsdecode(name)
        if path.is_file():
            digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(exist_ok=True)
    for old in folder.glob("argosy-*.whl"):
        old.unlink()
    kept = cache_folder() / f"wheel-{key(ROOT)}" if "ARGOSY_CI_CACHE" in os.environ else None
    if kept and (wheels := [*kept.glob("argosy-*.whl")]):
        print(f"{wheels[0].name}: there ({kept.name})")
        shutil.copy2(wheels[0], folder)
        return 0
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    build = [*pip, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    code = subprocess.run(build, check=False, env={**os.environ, "ARGOSY_COMPILE": "1"}).returncode
    if code == 0 and kept:
        kept.mkdir(parents=True, exist_ok=True)
        for wheel in folder.glob("argosy-*.whl"):
            partial = kept / f".{wheel.name}"
            shutil.copy2(wheel, partial)
            partial.rename(kept / wheel.name)
    return code


if __name__ == "__main__":
    sys.exit(main())

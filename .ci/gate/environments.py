"""Python environments of the gate, made once for what they install, and kept outside the checkout.

    $ARGOSY_CI_CACHE/environment-KEY    what groups of pyproject.toml ask for, without the project itself
    CHECKOUT/.venv                      a copy of it by hard links, with the checkout installed as editable

KEY is a hash of Python, the requirements and the constraints (.ci/gate/constraints, made by `make locks`). A folder
that is not whole (its count of files and bytes differs from when it was made) is made anew. pip replaces files and
never writes into them, so a checkout that installs something else does not change the cached environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WHOLE = ".whole"
CONSTRAINTS = Path(__file__).with_name("constraints")
TRIES = 3


def cache_folder() -> Path:
    """Return $ARGOSY_CI_CACHE, or `argosy-ci` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ARGOSY_CI_CACHE") or Path(base) / "argosy-ci").absolute()


def try_again(what: str, action: Callable[[], Any], tries: int = TRIES) -> None:
    """Do what downloads, up to three times.

    Raises:
        subprocess.CalledProcessError: it failed each time.
    """
    for number in range(1, tries + 1):
        try:
            action()
            return
        except subprocess.CalledProcessError as error:
            if number == tries:
                raise
            print(f"{what} failed (exit {error.returncode}); trying again", flush=True)


def requirements(pyproject: dict[str, Any], groups: tuple[str, ...], extras: tuple[str, ...]) -> list[str]:
    """Return what groups (PEP 735) and extras of the project ask for, one requirement each.

    Args:
        extras: their requirements and the project's own; without any, those of the groups alone.
    """
    project = pyproject["project"]
    wanted = [*project["dependencies"]] if extras else []
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    for group in groups:
        wanted += _group(pyproject, group)
    return list(dict.fromkeys(wanted))


def _group(pyproject: dict[str, Any], name: str) -> Iterator[str]:
    for entry in pyproject["dependency-groups"][name]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _group(pyproject, entry["include-group"])


def key(python: str, wanted: list[str], constraints: str) -> str:
    """Hash what decides the contents of an environment."""
    told = subprocess.run(
        [python, "-c", "import sys; print(sys.version, sys.prefix)"], check=True, capture_output=True
    )
    facts = [told.stdout.decode(), platform.machine(), *sorted(wanted), constraints]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def is_whole(folder: Path) -> bool:
    """Whether an environment has as many files and bytes as when it was made."""
    try:
        return json.loads((folder / WHOLE).read_text()) == _census(folder)
    except (OSError, ValueError):
        return False


def _census(folder: Path) -> list[int]:
    """Count files and their bytes, except of bytecode, which is written later."""
    count = size = 0
    for path, folders, names in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        for name in names:
            if name != WHOLE:
                count += 1
                size += os.lstat(os.path.join(path, name)).st_size
    return [count, size]


def cached_environment(python: str, wanted: list[str], constraints: Path) -> Path:
    """Return the cached environment with these requirements; make it if it is not there or not whole.

    Of several processes that want it at once, one makes it.
    """
    folder = cache_folder() / f"environment-{key(python, wanted, constraints.read_text(encoding='utf-8'))}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_whole(folder):
            print(f"{folder.name}: there", flush=True)
        else:
            _make_environment(folder, python, wanted, constraints)
    return folder


def _make_environment(folder: Path, python: str, wanted: list[str], constraints: Path) -> None:
    print(f"{folder.name}: installing {len(wanted)} requirements", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    try_again("pip", lambda: subprocess.run([*pip, "pip>=25.1"], check=True))
    try_again("pip", lambda: subprocess.run([*pip, "--constraint", str(constraints), *wanted], check=True))
    finish(folder)


def finish(folder: Path) -> None:
    """Note that an environment is whole."""
    (folder / WHOLE).write_text(json.dumps(_census(folder)))


def link(cached: Path, folder: Path) -> None:
    """Copy an environment by hard links, and write its new place into the files that name the old one."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(cached, folder, symlinks=True, copy_function=os.link)
    except (shutil.Error, OSError):  # another file system
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(cached, folder, symlinks=True)
    (folder / WHOLE).unlink()
    old, new = str(cached).encode(), str(folder.absolute()).encode()
    for path in (folder / "pyvenv.cfg", *(folder / "bin").iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if old in content and b"\0" not in content:
            mode = path.stat().st_mode
            path.unlink()
            path.write_bytes(content.replace(old, new))
            path.chmod(mode)


def install_tests(root: Path, folder: Path, python: str = sys.executable) -> None:
    """Make an environment in which the checkout is installed with all that its tests and lint need."""
    pyproject = _read(root)
    wanted = requirements(pyproject, ("dev",), ("engine", "fetch", "router", "batch", "operator"))
    link(cached_environment(python, wanted, CONSTRAINTS / "tests.txt"), folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    editable = ["--no-deps", "--no-build-isolation", "--editable", str(root)]
    subprocess.run([*pip, *editable], check=True)
    _mark(root, folder, "installed", "installed-dev")


def install_group(root: Path, folder: Path, group: str) -> None:
    """Make an environment of a dependency group, without the checkout."""
    wanted = requirements(_read(root), (group,), ())
    link(cached_environment(sys.executable, wanted, CONSTRAINTS / f"{group}.txt"), folder)
    _mark(root, folder, "installed")


def _read(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def _mark(root: Path, folder: Path, *names: str) -> None:
    """Leave the files by which the Makefile knows that it need not install."""
    digest = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()[:12]
    for name in names:
        (folder / f".{name}-{digest}").touch()

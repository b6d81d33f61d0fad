"""CompilationCache: the folder in which torch.compile keeps what it has generated for one model on one device.

    $XDG_CACHE_HOME/argosy/torch_compile/KEY        Inductor's cache, and Triton's for Inductor's kernels
    $XDG_CACHE_HOME/argosy/torch_compile/KEY.lock   held shared by the processes that use the folder

The key is a digest of all that generated code depends on. Processes may share a folder: Inductor writes its files under
other names first. Folders beyond the newest `MAX_FOLDERS` are removed unless they are in use. Only the current user may
write here, because what is read is executed, and Inductor reads it with pickle.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from argosy_engine import attention, layers, models
from argosy_engine.native.private_folder import NoPrivateFolder, private_folder

MAX_FOLDERS = 8
"""A folder of one model takes a few MB."""


class CacheUnavailable(Exception):
    """There is no place for the cache; the message says why."""


class CompilationCache:
    """One folder, in use until `close`.

    Args:
        root: where the folders of all models are; see `cache_root`.
        key: name of the folder; see `cache_key`.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.path = root / key
        self._lock = _lock(root / f"{key}.lock", fcntl.LOCK_SH)
        assert self._lock is not None
        self.path.mkdir(mode=0o700, exist_ok=True)
        os.utime(self.path)
        self._folder = self.path.stat().st_ino
        self.has_code = any(self.path.iterdir())
        """Whether something was generated here before."""
        _remove_oldest(root)

    def activate(self) -> None:
        """Let torch.compile of this process use the folder, and compile in this process instead of in some others.

        Triton's cache stays where TRITON_CACHE_DIR says, if it is set.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.path)
        os.environ.setdefault("TRITON_CACHE_DIR", str(self.path / "triton"))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def renew(self) -> None:
        """Replace the folder by an empty one, unless another process has done so since this one began to use it.

        Others that use it lose what they have not read yet, and generate it.
        """
        damaged = self.path.with_name(f"{self.path.name}.damaged-{os.getpid()}")
        if self.path.stat().st_ino == self._folder:
            self.path.rename(damaged)
            self.path.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(damaged, ignore_errors=True)
        self._folder = self.path.stat().st_ino
        self.has_code = False

    def close(self) -> None:
        """Allow others to remove the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def cache_root() -> Path:
    """Return `$XDG_CACHE_HOME/argosy/torch_compile`, created if missing.

    Raises:
        CacheUnavailable: it cannot be created or written, or others could write it.
    """
    try:
        return private_folder("torch_compile")
    except NoPrivateFolder as error:
        raise CacheUnavailable(str(error)) from None


def cache_key(device: torch.device, settings: Iterable[str]) -> str:
    """Return a digest of the code of the models, the compilers' versions, the device and a model's settings."""
    digest = hashlib.sha256()
    folders = (Path(package.__path__[0]) for package in (attention, layers, models))
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(file.read_bytes())
    versions = [f"{name} {_version(name)}" for name in ("torch", "triton")]
    for part in (*versions, platform.python_version(), _device_name(device), *settings):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _remove_oldest(root: Path) -> None:
    """Remove the oldest folders beyond `MAX_FOLDERS` that no process uses. Never fails."""
    with contextlib.suppress(OSError):
        folders = sorted(
            (each for each in root.iterdir() if each.is_dir()), key=lambda each: each.stat().st_mtime
        )
        for folder in folders[: max(len(folders) - MAX_FOLDERS, 0)]:
            lock_file = root / f"{folder.name}.lock"
            lock = _lock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lock_file.unlink(missing_ok=True)
                os.close(lock)


def _lock(path: Path, kind: int) -> int | None:
    """Open and lock a file; None if another process holds it and `kind` does not wait."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, kind)
            if os.fstat(file).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except FileNotFoundError:
            pass
        os.close(file)  # it was removed meanwhile

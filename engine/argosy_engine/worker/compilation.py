"""Compilation: whether a worker compiles its layers, with which cache, and what became of it.

`--compilation-config '{"level": 3}'` asks for it. Where it is impossible, or fails its test, the layers run at level 0,
and a line of the log says why.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from argosy_engine import attention, layers, models
from argosy_engine.config import EngineArgs
from argosy_engine.layers.layer_compiler import LayerCompiler
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.models.registry import CausalLM
from argosy_engine.native.build import NativeUnavailable, find_compiler
from argosy_engine.native.private_folder import NoPrivateFolder, private_folder

logger = logging.getLogger(__name__)

MAX_FOLDERS = 8
"""A folder of one model takes a few MB."""


class CacheUnavailable(Exception):
    """There is no place for the cache; the message says why."""


class CompilationCache:
    """The folder in which torch.compile keeps what it has generated for one model on one device, in use until `close`.

        $XDG_CACHE_HOME/argosy/torch_compile/KEY        Inductor's cache, and Triton's for Inductor's kernels
        $XDG_CACHE_HOME/argosy/torch_compile/KEY.lock   held shared by the processes that use the folder

    The key is a digest of all that generated code depends on. Processes may share a folder: Inductor writes its files
    under other names first. Folders beyond the newest `MAX_FOLDERS` are removed unless they are in use. Only the
    current user may write here, because what is read is executed, and Inductor reads it with pickle.

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


@dataclass(frozen=True, slots=True)
class LayerCompilation:
    """The compiler of a worker's layers and its cache."""

    compiler: LayerCompiler
    cache: CompilationCache

    def prepare(
        self, model: CausalLM, dtype: torch.dtype, device: torch.device, on_part: Callable[[], None]
    ) -> bool:
        """Compile a model's layers; False if they must run at level 0.

        The model must have been made with this compiler.

        Args:
            on_part: called after each compilation.
        """
        started = time.perf_counter()
        generated = _num_generated()
        reason = self.compiler.prepare(model.layers, dtype, device, on_part)
        if reason is not None and self.cache.has_code:
            logger.warning("the cache %s may be damaged and is made anew: %s", self.cache.path, reason)
            try:
                self.cache.renew()
            except OSError as error:
                reason = f"{reason}; the cache {self.cache.path} cannot be removed: {error.strerror}"
            else:
                self.compiler.forget()
                reason = self.compiler.prepare(model.layers, dtype, device, on_part)
        if reason is None and not self.compiler.num_compilations:
            reason = "this model has no layers that can be compiled"
        if reason is not None:
            self.cache.close()
            _log_refusal(reason)
            return False
        logger.info(
            "compiled parts of the layers: %d graphs, %d of them not in the cache %s, in %.1f s",
            self.compiler.num_compilations,
            _num_generated() - generated,
            self.cache.path,
            time.perf_counter() - started,
        )
        return True


def start_compilation(
    args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, attention_backend: str
) -> LayerCompilation | None:
    """Return what compiles a model's layers. None: it is not asked for, or impossible, which is logged."""
    if args.compilation_config.level == 0:
        return None
    reason = _refusal(args, config, device)
    if reason is None:
        settings = (
            repr(config),
            str(dtype),
            attention_backend,
            f"tensor parallel {args.tensor_parallel_size}",
        )
        try:
            cache = CompilationCache(cache_root(), cache_key(device, settings))
        except (CacheUnavailable, OSError) as error:
            reason = str(error)
        else:
            cache.activate()
            return LayerCompilation(LayerCompiler(), cache)
    _log_refusal(reason)
    return None


def _refusal(args: EngineArgs, config: ModelConfig, device: torch.device) -> str | None:
    """Return why layers cannot be compiled, or None."""
    if args.enforce_eager:
        return "--enforce-eager wins, as in vLLM"
    if config.quantization is not None or args.quantization is not None:
        return "with quantised weights our own kernels quantise what the products read; leave level 3 out"
    if device.type == "cuda":
        return None
    try:
        find_compiler()
    except NativeUnavailable:
        return "torch.compile needs a C++ compiler on a CPU; install g++, or name one in CXX"
    return None


def _log_refusal(reason: str) -> None:
    logger.warning("layers are not compiled (--compilation-config level 0): %s", reason)


def _num_generated() -> int:
    """Return the number of graphs that Inductor has generated code for in this process, rather than read it."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])

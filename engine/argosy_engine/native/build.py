"""Builds the kernels in src/ with g++ for this CPU, once per user, or ahead of time for an image.

A library is named by the digest of its sources, flags and compiler. It is looked for in the package (`prebuilt/`, which
`python -m argosy_engine.native.build` fills where an image is built), then in the user's cache directory, and else
compiled there: under a lock, to a temporary name, so that any number of engines may start at once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"

_COMPILE_TIMEOUT_S = 300.0
"""A quiet machine needs a few seconds; a busy one with one core a minute."""
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
)


@dataclass(frozen=True)
class Variant:
    """An instruction set: what /proc/cpuinfo must list, and what the compiler is told."""

    name: str
    cpu_flags: frozenset[str]
    compile_flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
VARIANTS = (
    Variant(
        "avx512_bf16",
        frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
        (*_AVX512, "-mavx512bf16"),
    ),
    Variant("avx512", frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}), _AVX512),
    Variant("avx2", frozenset({"avx2", "fma"}), _AVX2),
)
"""Best first."""


class NativeUnavailable(Exception):
    """The kernels cannot be used here; the message says why. Nothing is wrong with the request or the model."""


def library_path(variant: Variant | None = None, *, is_debug: bool = False) -> Path:
    """The library of a variant (default: the best for this CPU), built if need be.

    Raises:
        NativeUnavailable: no variant for this CPU, no compiler, no place to keep the result, or a failed build.
    """
    variant = variant or choose_variant(cpu_flags())
    prebuilt = PREBUILT / f"{variant.name}-{_digest(variant, '')}.so"
    if not is_debug and prebuilt.is_file():
        return prebuilt
    compiler = find_compiler()
    flags = ("-DARGOSY_DEBUG", "-g") if is_debug else ()
    digest = _digest(variant, " ".join((_version(compiler), *flags)))
    path = cache_directory() / f"{variant.name}-{digest}.so"
    if not path.is_file():
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                compile_library(compiler, variant, path, flags)
    return path


def cpu_flags() -> frozenset[str]:
    """Flags of the first CPU in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset()
    )


def choose_variant(flags: frozenset[str]) -> Variant:
    for variant in VARIANTS:
        if variant.cpu_flags <= flags:
            return variant
    raise NativeUnavailable(
        f"this CPU ({platform.machine()}) has none of: {', '.join(v.name for v in VARIANTS)}"
    )


def find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailable("there is no C++ compiler (g++) and no prebuilt library for this CPU")


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/argosy/native`, which only we may write: what lies there is executed."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(base) / "argosy" / "native"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise NativeUnavailable(f"cannot create {path}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable(f"{path} belongs to, or may be written by, somebody else")
    if not os.access(path, os.W_OK):
        raise NativeUnavailable(f"{path} cannot be written")
    return path


def compile_library(compiler: str, variant: Variant, target: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Compiles the sources side by side, links them and moves the result to `target` in one step."""
    flags = (*_FLAGS, *variant.compile_flags, *extra_flags)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        sources = sorted(SOURCES.glob("*.cc"))
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        _run(
            *(
                [compiler, *flags, "-c", str(source), "-o", output]
                for source, output in zip(sources, objects, strict=True)
            )
        )
        _run([compiler, "-shared", "-pthread", *objects, "-o", f"{scratch}/library.so"])
        os.replace(f"{scratch}/library.so", target)


def _run(*commands: list[str]) -> None:
    """Runs compilers side by side; the first failure ends the others."""
    jobs: list[subprocess.Popen[str]] = []
    try:
        jobs.extend(
            subprocess.Popen(  # noqa: S603 - our own arguments, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        )
        for job in jobs:
            _, errors = job.communicate(timeout=_COMPILE_TIMEOUT_S)
            if job.returncode:
                lines = errors.splitlines() or [f"exit status {job.returncode}"]
                first = next((line for line in lines if "error" in line), lines[0])
                raise NativeUnavailable(f"the compiler failed: {first}")
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"the compiler took longer than {_COMPILE_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise NativeUnavailable(f"cannot run the compiler: {error.strerror}") from None
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
            job.communicate()


def _digest(variant: Variant, toolchain: str) -> str:
    digest = hashlib.sha256("\0".join((*_FLAGS, *variant.compile_flags, toolchain)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            [compiler, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot run {compiler}: {error}") from None
    return done.stdout.partition("\n")[0]


def main() -> int:
    """Compiles every variant into the package."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=PREBUILT)
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    for variant in VARIANTS:
        path = output / f"{variant.name}-{_digest(variant, '')}.so"
        compile_library(compiler, variant, path)
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Builds the kernels in src/ with g++ for this CPU, once per user, or ahead of time for an image.

A library's name contains the digest of its sources, flags and compiler. It is looked up in the package (`prebuilt/`,
which `python -m argosy_engine.native.build` fills when an image is built), then in the user's cache directory. If it is
in neither, it is compiled into the cache directory, under a lock and a temporary name, so that any number of engines
can start at once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argosy_engine.native.private_folder import NoPrivateFolder, private_folder

if TYPE_CHECKING:
    from argosy_engine.native.kernel_choice import Figures, Measure

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"

ENVIRONMENT_VARIABLE = "ARGOSY_NATIVE"
"""0: compute with torch; debug: use kernels that check their indices; anything else: use kernels where possible."""

_COMPILE_TIMEOUT_S = 300.0
"""An idle machine takes a few seconds, a busy one with one core a minute."""
BASE_FLAGS = (
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
    """An instruction set: the flags that /proc/cpuinfo must list, and the compiler's flags."""

    name: str
    cpu_flags: frozenset[str]
    compile_flags: tuple[str, ...]
    lanes: int
    """float32 elements of a vector register."""

    @property
    def has_tiles(self) -> bool:
        """Whether it uses AMX, which a system may refuse."""
        return any(flag.startswith("-DARGOSY_TILES") for flag in self.compile_flags)


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_AVX512_CPU = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
_BF16 = (*_AVX512, "-mavx512bf16")
VARIANTS = (
    Variant(
        "amx_bf16",
        _AVX512_CPU | {"avx512_bf16", "amx_tile", "amx_bf16"},
        (*_BF16, "-DARGOSY_TILES=Hardware"),
        16,
    ),
    Variant("avx512_bf16", _AVX512_CPU | {"avx512_bf16"}, _BF16, 16),
    Variant("avx512", _AVX512_CPU, _AVX512, 16),
    Variant("avx2", frozenset({"avx2", "fma"}), _AVX2, 8),
)
"""Best first."""
AMX_MODEL = Variant("amx_model", _AVX512_CPU, (*_AVX512, "-DARGOSY_TILES=Model"), 16)
"""`amx_bf16` with a model of its instructions, for tests on other CPUs."""

_SLOW_BF16 = frozenset({("GenuineIntel", 6, model) for model in (143, 173, 174, 207)})
"""CPUs (vendor, family, model) that multiply bf16 by AVX-512 at half the rate of float32: Sapphire, Emerald and Granite
Rapids."""
_FAST_BF16 = frozenset({"AuthenticAMD"})
"""Vendors whose CPUs multiply bf16 by AVX-512 at twice the rate of float32, if they do at all. CPUs of others are
measured (`kernel_choice`)."""


MeasureVariants = Callable[[Sequence[Variant]], Mapping[str, Sequence[float]]]
"""See `kernel_choice.Measure`.

Raises:
    NativeUnavailable: a variant cannot be built.
"""


class NativeUnavailable(Exception):
    """The kernels cannot be used on this machine; the message says why. The engine falls back to torch."""


def usable_variant() -> Variant:
    """Return the variant that an engine would use, as far as can be told without building it.

    Raises:
        NativeUnavailable: the kernels are switched off, or there is no variant for this CPU, or neither a prebuilt
            library nor a compiler.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        raise NativeUnavailable(f"the kernels are off ({ENVIRONMENT_VARIABLE}=0)")
    variant = own_variants()[0]
    if not _prebuilt(variant).is_file():
        find_compiler()
    return variant


def has_kernels(dtype: str, device: str) -> bool:
    """Whether an engine would use the kernels on a device and in a dtype, as far as can be told without building them.

    Args:
        dtype: of the activations, without `torch.`.
    """
    if device != "cpu" or dtype not in ("float32", "bfloat16"):
        return False
    try:
        usable_variant()
    except NativeUnavailable:
        return False
    return True


def _prebuilt(variant: Variant) -> Path:
    return PREBUILT / f"{variant.name}-{_digest(variant, '')}.so"


def library_path(variant: Variant | None = None, *, is_debug: bool = False) -> Path:
    """Return the path of a variant's library (default: the best variant for this CPU), building it if necessary.

    Raises:
        NativeUnavailable: no variant for this CPU, no compiler, no place to keep the result, or a failed build.
    """
    variant = variant or own_variants()[0]
    prebuilt = _prebuilt(variant)
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
    """Return the flags of the first CPU in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset()
    )


def cpu_model() -> tuple[str, int, int]:
    """Return vendor, family and model of the first CPU in /proc/cpuinfo; zeros where they are not told."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    family, model = (fields.get(name, "") for name in ("cpu family", "model"))
    return (
        fields.get("vendor_id", ""),
        int(family) if family.isdecimal() else 0,
        int(model) if model.isdecimal() else 0,
    )


def fitting_variants(flags: frozenset[str], model: tuple[str, int, int] = ("", 0, 0)) -> list[Variant]:
    """Return the variants for a CPU, best first. Its system may still refuse the registers of the first.

    Raises:
        NativeUnavailable: there is none.
    """
    found = [each for each in VARIANTS if each.cpu_flags <= flags]
    if model in _SLOW_BF16:
        found = [each for each in found if each.name != "avx512_bf16"]
    if not found:
        raise NativeUnavailable(
            f"this CPU ({platform.machine()}) has none of: {', '.join(v.name for v in VARIANTS)}"
        )
    return found


@dataclass(frozen=True)
class MeasuredChoice:
    """The two variants between which a CPU that the tables do not know is measured."""

    default: Variant
    rival: Variant
    model: tuple[str, int, int]

    def file(self, folder: Path) -> Path:
        """Return where the figures are kept: of this model of CPU, and these kernels."""
        vendor, family, model = self.model
        sources = hashlib.sha256(f"{_digest(self.default, '')} {_digest(self.rival, '')}".encode())
        name = re.sub(r"[^A-Za-z0-9]+", "_", vendor)[:32] or "unknown"
        return folder / f"choice-{name}-{family}-{model}-{sources.hexdigest()[:16]}.json"

    def figures(self, measure: Measure | None) -> Figures | None:
        """Return the kept figures, measuring them first if need be; None if there are none.

        Args:
            measure: None: only kept figures are returned.
        """
        # It needs msgspec, without which the kernels of an image are built.
        from argosy_engine.native.kernel_choice import kept_figures, measured_figures

        names = self.default.name, self.rival.name
        try:
            file = self.file(private_folder("native"))
            return kept_figures(file, *names) if measure is None else measured_figures(file, *names, measure)
        except (NoPrivateFolder, NativeUnavailable) as error:
            log.info("this CPU is not measured, and uses %s: %s", self.default.name, error)
            return None


def measured_choice(found: list[Variant], model: tuple[str, int, int]) -> MeasuredChoice | None:
    """Return the choice that a measurement makes among the variants for a CPU, best first; None: they are settled."""
    if len(found) < 2 or model[0] in _FAST_BF16:
        return None
    if [each.name for each in found[:2]] != ["avx512_bf16", "avx512"]:
        return None
    return MeasuredChoice(found[0], found[1], model)


def own_variants(measure: MeasureVariants | None = None, *, has_tiles: bool = True) -> list[Variant]:
    """Return the variants for this CPU; see `fitting_variants`.

    Args:
        measure: times the variants of a CPU that the tables do not know; None: it uses what was measured before, or the
            default.
        has_tiles: False: without those that use AMX.
    """
    model = cpu_model()
    found = [each for each in fitting_variants(cpu_flags(), model) if has_tiles or not each.has_tiles]
    if (choice := measured_choice(found, model)) is None:
        return found
    pair = choice.default, choice.rival
    figures = choice.figures(None if measure is None else lambda: measure(pair))
    if figures is None:
        return found
    names = choice.default.name, choice.rival.name
    if measure is not None:
        log.info("CPU kernels %s", figures.describe(*names))
    return found[1:] if figures.prefers(*names) else found


def describe_choice() -> str:
    """Say which variant serves on this CPU, and by what it was chosen.

    Raises:
        NativeUnavailable: see `usable_variant`.
    """
    variant, model = usable_variant(), cpu_model()
    if (choice := measured_choice(fitting_variants(cpu_flags(), model), model)) is None:
        return variant.name
    if (figures := choice.figures(None)) is not None:
        return figures.describe(choice.default.name, choice.rival.name)
    return f"{variant.name}, unless {choice.rival.name} is faster on this CPU, which the first start measures"


def find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailable("there is no C++ compiler (g++) and no prebuilt library for this CPU")


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/argosy/native`, created if missing.

    Raises:
        NativeUnavailable: the directory cannot be created or written, or others could write it.
    """
    try:
        return private_folder("native")
    except NoPrivateFolder as error:
        raise NativeUnavailable(str(error)) from None


def compile_library(compiler: str, variant: Variant, target: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile the sources in parallel, link them and move the result to `target` atomically."""
    flags = (*BASE_FLAGS, *variant.compile_flags, *extra_flags)
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
    """Run compilers in parallel; if one fails, kill the others.

    Raises:
        NativeUnavailable: a compiler failed, timed out or cannot be run.
    """
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
    digest = hashlib.sha256("\0".join((*BASE_FLAGS, *variant.compile_flags, toolchain)).encode())
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

"""Compile the router: extension modules for its hot modules, which more than halve the CPU time of a short request.

    python build_hooks/compile_router.py OUTPUT

OUTPUT gets one extension module for every module that is compiled, in the folders of the package. Python prefers them
to the sources beside them. `hatch_build.py` puts them into a wheel. Needs mypy, setuptools and a C compiler.

Every module of the router is compiled unless it has a line `# Not compiled: REASON.`, or its package's `__init__` has
one. mypyc makes annotations binding: where the interpreted router passes on a value of another type, the compiled one
raises TypeError. The router's tests run on both.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Extension

ROOT = Path(__file__).resolve().parents[1]
ROUTER = ROOT / "router" / "argosy_router"
PROTOCOL = ROOT / "protocol" / "argosy_protocol"

_MARK = re.compile(r"^# Not compiled: (\S.*)$", re.MULTILINE)
_GROUP = "argosy_router"
"""All compiled modules are in one shared library of this name, so that they call each other directly."""
_MYPY = """\
[mypy]
ignore_missing_imports = true
follow_imports = skip
disable_error_code = misc, no-any-return
[mypy-argosy_router.*,argosy_protocol.*]
follow_imports = normal
"""
"""mypy's settings. Libraries written in Python count as untyped, because some of them take minutes to read and none is
on a request's path; those with stubs (msgspec, xxhash) are typed."""
_C_FLAGS = ("-O2", "-g0", "-fvisibility=hidden")
"""They come after mypyc's own. -O3 takes longer and gains nothing here. Hidden symbols are called directly, although
each module has an object file of its own."""


def modules(package: Path) -> list[Path]:
    """Return the files to compile, relative to `package`'s parent."""
    return [
        path.relative_to(package.parent)
        for path in sorted(package.rglob("*.py"))
        if path.name != "__init__.py" and reason_not_to_compile(path, package) is None
    ]


def reason_not_to_compile(path: Path, package: Path) -> str | None:
    """Return what a module's mark says, or that of a package around it."""
    around = [parent / "__init__.py" for parent in path.parents if parent.is_relative_to(package)]
    for marked in (path, *around):
        if found := _MARK.search(marked.read_text("utf-8")):
            return found[1]
    return None


def in_c(package: Path) -> list[Path]:
    """Return the modules written in C, relative to `package`'s parent. `native` has their substitutes in Python."""
    return [path.relative_to(package.parent) for path in sorted(package.rglob("*.c"))]


def compile_router(output: Path) -> None:
    """Fill `output`, an existing empty folder, with the extension modules.

    Raises:
        SystemExit: mypy, setuptools or a compiler is missing, or one of them failed; the message says which.
    """
    with tempfile.TemporaryDirectory(prefix="argosy-compile-") as scratch:
        for package in (ROUTER, PROTOCOL):
            shutil.copytree(
                package, Path(scratch, package.name), ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        with chdir(scratch):  # mypyc takes and writes relative paths
            started = time.monotonic()
            extensions = [*_from_python(modules(Path(ROUTER.name))), *_from_c(in_c(Path(ROUTER.name)))]
            translated = time.monotonic()
            _build(extensions, output)
    print(
        f"compiled {len(modules(ROUTER))} modules: {translated - started:.0f} s of mypyc, "
        f"{time.monotonic() - translated:.0f} s of the C compiler"
    )


def _from_python(paths: list[Path]) -> list[Extension]:
    """Translate modules to C, each to a file of its own."""
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: pip install --group compile") from None
    Path("mypy.ini").write_text(_MYPY)
    gc.disable()  # as mypy's own command does: its trees have millions of objects and are never freed
    extensions = mypycify(["--config-file=mypy.ini", *map(str, paths)], multi_file=True, group_name=_GROUP)
    gc.freeze()
    gc.enable()
    for extension in extensions:
        extension.extra_compile_args = [*extension.extra_compile_args, *_C_FLAGS]
    return extensions


def _from_c(paths: list[Path]) -> list[Extension]:
    from setuptools import Extension

    return [
        Extension(".".join(path.with_suffix("").parts), [str(path)], extra_compile_args=list(_C_FLAGS))
        for path in paths
    ]


def _build(extensions: list[Extension], output: Path) -> None:
    """Compile all C files side by side, the largest first, and link each extension.

    setuptools compiles the files of one extension one after another, and nearly all are of one.
    """
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import BaseError

    class SideBySide(build_ext):
        def build_extensions(self) -> None:
            sources = [
                (number, source)
                for number, extension in enumerate(self.extensions)
                for source in extension.sources
            ]
            sources.sort(key=lambda each: -Path(each[1]).stat().st_size)
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                try:
                    pending = [
                        (number, pool.submit(self.compile_source, self.extensions[number], source))
                        for number, source in sources
                    ]
                    objects: dict[int, list[str]] = defaultdict(list)
                    for number, compiled in pending:
                        objects[number] += compiled.result()
                    links = [
                        pool.submit(self.link_extension, extension, objects[number])
                        for number, extension in enumerate(self.extensions)
                    ]
                    for link in links:
                        link.result()
                finally:
                    pool.shutdown(cancel_futures=True)

        def compile_source(self, extension: Extension, source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=extension.include_dirs,
                extra_postargs=extension.extra_compile_args,
                depends=extension.depends,
            )

        def link_extension(self, extension: Extension, objects: list[str]) -> None:
            self.compiler.link_shared_object(
                objects, self.get_ext_fullpath(extension.name), libraries=self.get_libraries(extension)
            )

    command = SideBySide(Distribution({"name": _GROUP, "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(output), "objects"
    command.ensure_finalized()
    try:
        command.run()
    except BaseError as error:
        raise SystemExit(f"{error}: install a C compiler and Python's headers, or set CC") from None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder to fill; must not exist, or be empty")
    output: Path = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        parser.error(f"{output} is not empty")
    compile_router(output)


if __name__ == "__main__":
    main()

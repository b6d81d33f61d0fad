"""Machine code for what every request passes: half the CPU per request.

    python -m argosy_router.compile OUTPUT

OUTPUT gets a copy of this package with extension modules beside the sources they were made of; Python prefers them.
Put in front on PYTHONPATH, or copied over the installed package, it is the same router, faster. It needs mypy,
setuptools and a C compiler, for some minutes; without it the router runs from its sources as it is.

Every module is compiled unless it has a line `# Not compiled: REASON.`, or its package's `__init__` has one.

mypyc makes annotations binding: where an interpreted router carries a value of another type along, a compiled one
raises TypeError. The router's tests run on both.
"""

# Not compiled: it compiles the others.

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).parent
_MARK = re.compile(r"^# Not compiled: (\S.*)$", re.MULTILINE)
MYPY = """\
[mypy]
ignore_missing_imports = true
disable_error_code = misc, no-any-return
[mypy-kubernetes.*,fastapi.*,uvicorn.*,prometheus_client.*,opentelemetry.*,yaml.*]
follow_imports = skip
"""
"""mypy's settings: libraries that take long to read and are on no request's path count as untyped."""


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


def compile_into(output: Path) -> None:
    """Fill `output`, an existing empty folder, with the compiled package.

    Raises:
        SystemExit: mypy, setuptools or a compiler is missing, or the compiler failed; the message says which.
    """
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution, Extension
        from setuptools.errors import CompileError
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: pip install 'argosy[compile]'") from None
    package = output / SOURCE.name
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    os.chdir(output)  # both tools write next to their input
    sys.path.insert(0, str(output))
    Path("mypy.ini").write_text(MYPY)
    gc.disable()  # as mypy's own command does: its trees have millions of objects and are never freed
    extensions = mypycify(["--config-file=mypy.ini", *map(str, modules(package))], opt_level="2")
    gc.freeze()
    for path in in_c(package):
        name = ".".join(path.with_suffix("").parts)
        extensions.append(Extension(name, [str(path)], extra_compile_args=["-O2"]))
    distribution = Distribution({"name": SOURCE.name, "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    try:
        command.run()
    except CompileError as error:
        raise SystemExit(f"{error}: install a C compiler and Python's headers, or set CC") from None
    shutil.rmtree("build")
    shutil.rmtree(".mypy_cache", ignore_errors=True)
    Path("mypy.ini").unlink()


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
    compile_into(output)
    print(f"compiled {len(modules(output / SOURCE.name))} modules into {output}")


if __name__ == "__main__":
    main()

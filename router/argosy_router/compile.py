"""Machine code for what every request passes: half the CPU per request.

    python -m argosy_router.compile OUTPUT

OUTPUT gets a copy of this package with extension modules beside the sources they were made of; Python prefers them.
Put in front on PYTHONPATH, or copied over the installed package, it is the same router, faster. It needs mypy,
setuptools, a C compiler and xxhash's header, for some minutes; without it the router runs from its sources as it is.

mypyc makes annotations binding: where an interpreted router carries a value of another type along, a compiled one
raises TypeError. The router's tests run on both.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).parent
COMPILED = (
    "auth/*",
    "fleet/candidates",
    "fleet/fleet",
    "fleet/health",
    "fleet/load",
    "fleet/prompt",
    "fleet/prompt_lengths",
    "fleet/replica",
    "fleet/service",
    "fleet/telemetry",
    "flow_control/*",
    "http/client",
    "http/deadlines",
    "http/interfaces",
    "http/messages",
    "http/pool",
    "http/read_coalescing",
    "http/request_reader",
    "http/server_connection",
    "http/sse",
    "metrics/series",
    "policy/*",
    "prefixes/*",
    "proxy/*",
    "ratelimit/*",
    "records/access_log",
    "records/usage_ledger",
)
"""Modules on the path of a request or a routing decision; the speed of all others does not matter."""
INTERPRETED = {
    "__init__": "nothing to compile",
    "auth/terms": "msgspec reads the annotations, which extension modules do not keep",
    "flow_control/queued_request": "open to be derived from",
    "prefixes/table": "a compiled router has the one in C",
    "proxy/inner_client": "an asynchronous generator, which mypyc does not know",
    "proxy/queued_call": "its base class is not compiled",
    "proxy/stream_event": "as `terms`",
}
"""Modules in these packages that stay interpreted, and why."""
IN_C = ("native/_hashing", "native/_table")
"""Modules written in C. The package `native` has their substitutes in Python."""
MYPY = """\
[mypy]
ignore_missing_imports = true
disable_error_code = misc, no-any-return
[mypy-kubernetes.*,fastapi.*,uvicorn.*,prometheus_client.*,opentelemetry.*,yaml.*]
follow_imports = skip
"""
"""mypy's settings: libraries that take long to read and are on no request's path count as untyped."""


def modules(package: Path) -> list[Path]:
    """Files to compile, relative to `package`'s parent."""
    found = [path for name in COMPILED for path in sorted(package.glob(f"{name}.py"))]
    return [
        path.relative_to(package.parent)
        for path in found
        if not any(path.match(f"{name}.py") for name in INTERPRETED)
    ]


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
    for name in IN_C:
        path = f"{SOURCE.name}/{name}"
        extensions.append(Extension(path.replace("/", "."), [f"{path}.c"], extra_compile_args=["-O2"]))
    distribution = Distribution({"name": SOURCE.name, "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    try:
        command.run()
    except CompileError as error:
        raise SystemExit(
            f"{error}: install a C compiler and the headers of Python and xxhash (libxxhash-dev), or set CC"
        ) from None
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

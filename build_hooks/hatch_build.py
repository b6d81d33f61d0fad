"""Build hook of hatch: compiles the router into the wheel, for this interpreter, if ARGOSY_COMPILE=1.

Without the variable the wheel is `py3-none-any`, and the router runs from its Python sources.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "ARGOSY_COMPILE"


class CompiledRouterHook(BuildHookInterface):
    """Adds the router's extension modules to a wheel, and tags it with interpreter and platform."""

    _output: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what an isolated build installs: the dependency group `compile`, if the router is to be compiled."""
        if not _is_asked_for():
            return []
        project = tomllib.loads(Path(self.root, "pyproject.toml").read_text("utf-8"))
        return list(project["dependency-groups"]["compile"])

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is put together. An editable installation always stays pure."""
        if version != "standard" or not _is_asked_for():
            return
        self._output = tempfile.TemporaryDirectory(prefix="argosy-wheel-")
        compiler = Path(self.root, "build_hooks", "compile_router.py")
        # In a process of its own, because mypy takes a gigabyte and never returns it.
        subprocess.run([sys.executable, str(compiler), self._output.name], check=True)  # noqa: S603
        for path in sorted(Path(self._output.name).rglob("*.so")):
            build_data["force_include"][str(path)] = str(path.relative_to(self._output.name))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what has been packed."""
        if self._output is not None:
            self._output.cleanup()


def _is_asked_for() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value}: 1 compiles the router, 0 or nothing does not")
    return value == "1"

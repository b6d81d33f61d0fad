"""A package whose docstring lists its modules lists all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ENGINE = Path(__file__).parents[1] / "engine" / "argosy_engine"
_PACKAGES = (
    "api/openai",
    "attention",
    "distributed",
    "executor",
    "frontend",
    "models",
    "parsers",
    "sample",
    "structured",
    "triton_kernels",
)


@pytest.mark.parametrize("package", _PACKAGES)
def test_a_package_lists_its_modules(package: str) -> None:
    folder = _ENGINE / package
    docstring = (folder / "__init__.py").read_text().split('"""')[1]
    modules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert modules - {"__init__"} - set(re.findall(r"\w+", docstring)) == set()


@pytest.mark.parametrize("package", _PACKAGES)
def test_a_package_lists_no_module_that_it_does_not_have(package: str) -> None:
    folder = _ENGINE / package
    rows = re.findall(r"^ *(\w+(?:, \w+)*) {2,}\S", (folder / "__init__.py").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in row.split(", ")}
    assert listed
    assert {
        name for name in listed if not ((folder / f"{name}.py").exists() or (folder / name).is_dir())
    } == set()

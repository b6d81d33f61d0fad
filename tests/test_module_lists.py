"""A package whose docstring lists its modules lists all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGES = (
    "cli/argosy/local",
    "engine/argosy_engine/api/openai",
    "engine/argosy_engine/api/processes",
    "engine/argosy_engine/api/responses",
    "engine/argosy_engine/api/routes",
    "engine/argosy_engine/attention",
    "engine/argosy_engine/benchmarks",
    "engine/argosy_engine/checkpoint",
    "engine/argosy_engine/distributed",
    "engine/argosy_engine/executor",
    "engine/argosy_engine/frontend",
    "engine/argosy_engine/layers",
    "engine/argosy_engine/model_configs",
    "engine/argosy_engine/models",
    "engine/argosy_engine/parsers",
    "engine/argosy_engine/sample",
    "engine/argosy_engine/structured",
    "engine/argosy_engine/triton_kernels",
    "engine/argosy_engine/worker",
    "fetcher/argosy_fetcher",
    "fetcher/argosy_fetcher/sources",
    "router/argosy_router/batch",
    "router/argosy_router/gateway",
    "router/argosy_router/responses",
    "router/argosy_router/storage",
)


@pytest.mark.parametrize("package", _PACKAGES)
def test_a_package_lists_its_modules(package: str) -> None:
    folder = _ROOT / package
    docstring = (folder / "__init__.py").read_text().split('"""')[1]
    modules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert modules - {"__init__"} - set(re.findall(r"\w+", docstring)) == set()


@pytest.mark.parametrize("package", _PACKAGES)
def test_a_package_lists_no_module_that_it_does_not_have(package: str) -> None:
    folder = _ROOT / package
    rows = re.findall(r"^ *(\w+(?:, \w+)*) {2,}\S", (folder / "__init__.py").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in row.split(", ")}
    assert listed
    assert {
        name for name in listed if not ((folder / f"{name}.py").exists() or (folder / name).is_dir())
    } == set()

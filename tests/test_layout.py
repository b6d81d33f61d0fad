"""The repository's layout and a few rules that hold in every package."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "argosy_protocol": "protocol",
    "argosy_http": "protocol",
    "argosy_fetcher": "fetcher",
    "argosy_resource": "operator",
    "argosy_operator": "operator",
    "argosy_engine": "engine",
    "argosy_router": "router",
    "argosy_batch": "batch",
    "argosy": "cli",
}
"""Each package, and the folder that holds it."""

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
"""What runs code out of data. `yaml.load_all` is used once, with a loader derived from SafeLoader."""


def test_a_folder_holds_packages_and_no_python_files() -> None:
    assert [path for folder in set(PACKAGES.values()) for path in (ROOT / folder).glob("*.py*")] == []
    wanted = [ROOT / folder / package for package, folder in PACKAGES.items()]
    files = [path / name for path in wanted for name in ("__init__.py", "py.typed")]
    assert [path for path in files if not path.is_file()] == []


def test_operator_is_the_standard_library_s_even_in_the_root() -> None:
    # -S: without it site imports the standard library's module first, which would hide a shadowing one
    script = "import sys; sys.path.insert(0, ''); import operator; print(operator.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "operator")


def sources() -> list[Path]:
    return [
        path
        for package, folder in PACKAGES.items()
        for path in sorted((ROOT / folder / package).rglob("*.py"))
    ]


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions. `ast.unparse` takes most of a search's time."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_LAST_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}


def is_forbidden(node: ast.Call) -> bool:
    return last_name(node.func) in _LAST_NAMES and ast.unparse(node.func) in FORBIDDEN_CALLS


_SUSPECT = re.compile(rf"\b({'|'.join(FORBIDDEN_MODULES | _LAST_NAMES | {'trust_remote_code'})})\b")
"""What a source with a violation has somewhere: most have not, and need not be parsed."""


def violations(source: str) -> Iterator[str]:
    if not _SUSPECT.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and is_forbidden(node):
            yield f"line {node.lineno}: calls {ast.unparse(node.func)}"
            continue
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield f"line {node.value.lineno}: trust_remote_code"
            continue
        else:
            continue
        for name in names:
            if name.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"line {node.lineno}: imports {name}"


def test_no_package_can_run_code_out_of_data() -> None:
    found = {str(path.relative_to(ROOT)): list(violations(path.read_text("utf-8"))) for path in sources()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "import torch\ntorch.load(path)",
        "import yaml as y, yaml\nyaml.load_all(text)\nyaml.unsafe_load(text)",
        "f(trust_remote_code=True)",
    ],
)
def test_the_rule_sees_what_it_forbids(source: str) -> None:
    assert len(list(violations(source))) == 1


def test_sources_are_found() -> None:
    assert {path.relative_to(ROOT).parts[1] for path in sources()} == set(PACKAGES)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Each module of a package -> the modules of the same package that it imports anywhere in its source, in functions
    and under TYPE_CHECKING too."""
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {module: set(imported(module, path, files)) for module, path in files.items()}


def imported(module: str, path: Path, modules: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module or "" for name in members]
        yield from (name for name in names if name in modules and name != module)


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle of a graph, empty if it has none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_modules_do_not_import_each_other_in_cycles() -> None:
    found = {package: cycle(import_graph(ROOT / folder / package)) for package, folder in PACKAGES.items()}
    assert {package: modules for package, modules in found.items() if modules} == {}


def test_the_cycle_check_sees_imports_of_types_and_in_functions(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "a.py").write_text("if TYPE_CHECKING:\n    from package.room.b import B")
    (package / "room" / "b.py").write_text("def f():\n    from package import c")
    (package / "c.py").write_text("import package.a, os")
    assert set(cycle(import_graph(package))) == {"package.a", "package.c", "package.room.b"}
    (package / "c.py").write_text("import os")
    assert cycle(import_graph(package)) == []


NO_PUBLIC_NAME = {
    "_replace": "part of the public interface of named tuples",
    "_exit": "`os` has no other name for it",
    "_from_config": "transformers has no other way to make a model of a given class from its configuration",
    "_patch_lang": "Triton's interpreter has no other place to replace its functions once per launch",
    "_convert_float": "Triton's interpreter has no other place to correct its rounding",
    "_init_args_hst": "Triton's interpreter tells nowhere else which tensors a launch has",
    "_interpreter": "Triton's interpreter has no other place to check addresses",
    "_changes": "Triton's interpreter tells nowhere else what it has replaced",
    "_MISSING": "Triton's interpreter has no other word for what was not there before",
    "_patch_attr": "Triton's interpreter has no other place to call built-in functions",
    "_get_np_dtype": "Triton's interpreter looks a type up anew for each value, and has no other place to remember it",
    "_validate_np_data_size": "as `_get_np_dtype`",
    "_unwrap_if_constexpr": "as `_get_np_dtype`",
}
"""Private-looking names that tests may use on other objects, and why."""

BY_NAME = {"setattr", "delattr", "getattr", "hasattr"}
"""Functions, and methods of pytest's monkeypatch, that take the name of an attribute as a string."""


def private_accesses(source: str) -> Iterator[str]:
    """Uses of other objects' private attributes. An object's own ones (`self._x`) are its business."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and last_name(node.func) in BY_NAME:
            values = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            names = [value.rpartition(".")[2] for value in values if isinstance(value, str)]
        for name in names:
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private and name not in NO_PUBLIC_NAME:
                yield f"line {node.lineno}: {name}"


def test_tests_use_public_names_only() -> None:
    found = {
        str(path.relative_to(ROOT)): list(private_accesses(path.read_text("utf-8")))
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    assert len(found) > 200
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("queue._waiting", 1),
        ("super()._start()", 1),
        ("from argosy_router.server import _wait", 1),
        ("monkeypatch.setattr(module, '_LIMIT', 1)", 1),
        ("monkeypatch.setattr('argosy_router.server._LIMIT', 1)", 1),
        ("getattr(queue().waiting, '_x'); setattr(queue, '_x', 1)", 2),
        ("self._x = cls._y", 0),
        ("self.queue._waiting", 1),
        ("event._replace(time=1); os._exit(1); event.__class__", 0),
        ("monkeypatch.setattr(module, 'LIMIT', '_x')", 0),
    ],
)
def test_the_rule_for_tests_sees_private_names(source: str, count: int) -> None:
    assert len(list(private_accesses(source))) == count


def imported_tests(source: str) -> list[str]:
    """Return the modules named `test_...` from which a module imports."""
    if not re.search(r"\bfrom\s+[\w.]*\btest_", source):
        return []
    return [
        node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.rpartition(".")[2].startswith("test_")
    ]


def test_no_test_imports_a_test() -> None:
    """What several tests use is in a module of its own, whose name says what it is."""
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (names := imported_tests(path.read_text("utf-8")))
    }
    assert found == {}


def test_the_rule_for_tests_sees_imports() -> None:
    source = "from .test_queue import x\nfrom tests.router.test_a import y\nfrom .harness import z"
    assert imported_tests(source) == ["test_queue", "tests.router.test_a"]


def test_a_component_has_no_two_public_classes_of_one_name() -> None:
    found = {
        folder: duplicates((name, module) for module in modules_of(folder) for name in public_classes(module))
        for folder in sorted(set(PACKAGES.values()))
    }
    assert {folder: names for folder, names in found.items() if names} == {}


def modules_of(folder: str) -> list[Path]:
    return [path for path in sources() if path.relative_to(ROOT).parts[0] == folder]


def public_classes(module: Path) -> list[str]:
    """Names of the classes that a module defines outside of functions and classes, under conditions too."""
    found, waiting = [], list(ast.parse(module.read_text("utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, (ast.If, ast.Try)):
            waiting += [inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)]
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


def duplicates(named: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Each name that occurs more than once -> the modules in which it does."""
    where: dict[str, list[str]] = {}
    for name, module in named:
        where.setdefault(name, []).append(str(module.relative_to(ROOT)))
    return {name: modules for name, modules in where.items() if len(modules) > 1}


def test_the_search_for_classes_sees_those_under_conditions(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "class A: ...\nif X:\n    class B: ...\nelse:\n    class B: ...\nclass _C: ...\ndef f():\n    class D: ..."
    )
    assert sorted(public_classes(module)) == ["A", "B"]

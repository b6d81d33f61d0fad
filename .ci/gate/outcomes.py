"""What came of a step of tests: counts, skips that nobody has listed, and whether a failure may be tried again.

A test that failed is run again alone, once, where that can tell chance from a fault (`why_not_again`). If it passes
then, the gate says FLAKY and prints a line that belongs into flaky.jsonl; a test listed there is not forgiven twice.
"""

from __future__ import annotations

import ast
import json
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

SKIPS = Path(__file__).with_name("skips.toml")
FLAKY = Path(__file__).with_name("flaky.jsonl")
MAX_RUN_AGAIN = 3
"""Failures of one step. More have a common cause."""
NEVER_AGAIN = {
    "crashed while running": "a process of the tests crashed",
    "Fatal Python error": "a process of the tests crashed",
    "Sanitizer": "a sanitizer's report",
    "runtime error: ": "a sanitizer's report",
    "Falsifying example": "an example of Hypothesis",
}
"""Texts in a traceback after which a second run proves nothing, and why."""
SOURCE_ROOTS = (
    "protocol", "fetcher", "operator", "engine", "router", "batch", "cli", "tests/support", "build_hooks", "generators",
    "conformance", "images", "e2e", "training", ".ci",
)  # fmt: skip
"""Folders from which tests import modules."""


@dataclass
class Outcomes:
    """Results of one run of pytest, by node id.

    Attributes:
        failed: traceback of each test that failed, or whose set-up or tear-down did.
        skipped: the reason of each test that was skipped.
        seconds: of each test, with set-up and tear-down.
        started: how many programs it started, those of a fixture that it was the first to need among them.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, report: Path) -> Outcomes:
        """Read a report in JUnit's form, family xunit1.

        Raises:
            OSError: there is none.
            ElementTree.ParseError: it was not written to its end.
        """
        outcomes = cls()
        for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 (our own file)
            node_id = f"{case.get('file', '')}::{case.get('name', '')}"
            outcomes.seconds[node_id] = outcomes.seconds.get(node_id, 0.0) + float(case.get("time", 0))
            for each in case.iter("property"):
                if each.get("name") == "started":
                    outcomes.started[node_id] = int(each.get("value", 0))
            trouble = [*case.findall("failure"), *case.findall("error")]
            skip = case.find("skipped")
            if trouble:
                outcomes.failed[node_id] = "\n".join(
                    f"{each.get('message', '')}\n{each.text or ''}" for each in trouble
                )
            elif skip is not None:
                outcomes.skipped[node_id] = skip.get("message", "")
            else:
                outcomes.passed.append(node_id)
        return outcomes


def unlisted_skips(skipped: dict[str, str], listed: Path = SKIPS) -> list[str]:
    """Return the skipped tests that the list does not name. A new skip is a failure: it hides what nobody runs."""
    patterns = [row["test"] for row in tomllib.loads(listed.read_text(encoding="utf-8"))["skip"]]
    return sorted(test for test in skipped if not any(fnmatchcase(test, pattern) for pattern in patterns))


def flaky_tests(path: Path = FLAKY) -> set[str]:
    """Return the tests that failed by chance before and are not mended."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["test"] for line in lines if line.strip()}


def why_not_again(
    failed: dict[str, str], known_flaky: Collection[str], changed: Collection[str], root: Path
) -> str | None:
    """Return why the failed tests are not run again; None if they may be.

    Args:
        failed: traceback of each test that failed, by node id.
        changed: paths that the change touches.
    """
    if not failed:
        return "no test failed"
    if len(failed) > MAX_RUN_AGAIN:
        return f"{len(failed)} tests failed; more than {MAX_RUN_AGAIN} have a common cause"
    touched = frozenset(changed)
    for test, traceback in failed.items():
        if test in known_flaky:
            return f"{test} failed by chance before and is not mended (.ci/gate/flaky.jsonl)"
        for text, reason in NEVER_AGAIN.items():
            if text in traceback:
                return f"{test}: {reason}"
        if imported := sorted(reached_from(test.partition("::")[0], root) & touched):
            return f"{test}: the change touches {imported[0]}, which the test imports"
    return None


def reached_from(test: str, root: Path) -> frozenset[str]:
    """Return the paths of a test file, of the conftest files above it, and of all modules of the repository that
    they import, directly or not. The name of a module in a string counts: tests start programs by it."""
    waiting = {root / test, root / "pyproject.toml"}
    folder = (root / test).parent
    for above in (folder, *folder.parents):
        waiting.add(above / "conftest.py")
        if above == root:
            break
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        if path.suffix == ".py":
            waiting |= {found for name in _named(path) for found in _files_of(name, path.parent, root)}
    return frozenset(str(path.relative_to(root)) for path in seen)


@cache
def _named(path: Path) -> frozenset[str]:
    """Dotted names that a source imports or has as strings; relative imports begin with a dot."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base.rstrip('.')}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            names |= {word for word in node.value.split() if word.replace(".", "_").isidentifier()}
    return frozenset(names)


@cache
def _files_of(name: str, beside: Path, root: Path) -> frozenset[Path]:
    """The files of the repository that a dotted name stands for, packages' __init__ on the way included."""
    places = [beside] if name.startswith(".") else [beside, *(root / each for each in SOURCE_ROOTS)]
    return frozenset(path for place in places for path in _below(place, name.lstrip(".").split(".")))


def _below(place: Path, parts: list[str]) -> Iterator[Path]:
    for part in parts:
        if not part:
            return
        if (module := place / f"{part}.py").is_file():
            yield module
        place /= part
        if (package := place / "__init__.py").is_file():
            yield package
        elif not place.is_dir():
            return

"""Lanes: which tests a lane holds, and which lanes a changed path selects. Read from lanes.toml.

A file of tests that no lane lists belongs to `units`, the tier of every change: its tests start no process and
interpret no kernel. `full` is the tier above all lanes: tests with the marker of that name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("lanes.toml")
UNITS = "units"
"""The lane that every change runs."""
FULL = "full"
"""Everything that any lane holds, and the tests that only `make full` runs."""
ALL = "all"
"""In lanes.toml and on command lines: every lane."""


class BadTable(Exception):
    """lanes.toml names what it does not define."""


@dataclass(frozen=True)
class Lanes:
    """The table of lanes.

    Attributes:
        purposes: each lane, in the order of the table, and what it tries.
        tests: pattern of test files -> its lane. `*` in a pattern crosses folders.
        paths: pattern of paths -> the lanes that a change of it selects besides `units`.
        smokes: node ids, or their beginnings, of tests in other lanes that `units` runs too.
    """

    purposes: dict[str, str]
    tests: dict[str, str]
    paths: dict[str, tuple[str, ...]]
    smokes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path = TABLE) -> Lanes:
        """Raises BadTable."""
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        purposes: dict[str, str] = table["lanes"]
        tests = {pattern: lane for lane, patterns in table["tests"].items() for pattern in patterns}
        every = tuple(purposes)
        paths = {
            pattern: every if ALL in lanes else tuple(lanes) for pattern, lanes in table["paths"].items()
        }
        unknown = {*tests.values(), *(lane for lanes in paths.values() for lane in lanes)} - {*purposes}
        if unknown:
            raise BadTable(f"{path.name} has no lanes {', '.join(sorted(unknown))} in [lanes]")
        return cls(purposes, tests, paths, tuple(table["smokes"]))

    @cached_property
    def _test_patterns(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.tests.items())

    def of_test(self, path: str) -> str:
        """Return the lane of a file of tests.

        Args:
            path: relative to the repository, with slashes.
        """
        for pattern, lane in self._test_patterns:
            if fnmatchcase(path, pattern):
                return lane
        return UNITS

    def has_smoke(self, path: str) -> bool:
        return any(smoke.partition("::")[0] == path for smoke in self.smokes)

    def is_smoke(self, node_id: str) -> bool:
        return any(node_id == smoke or node_id.startswith(f"{smoke}[") for smoke in self.smokes)

    def holds(self, node_id: str, chosen: frozenset[str]) -> bool:
        """Return whether a test runs in one of the lanes. `units` has the smokes of the others as well."""
        path = node_id.partition("::")[0]
        return self.of_test(path) in chosen or (UNITS in chosen and self.is_smoke(node_id))

    def rows_of(self, path: str) -> list[str]:
        """Return the patterns of `paths` that a path matches."""
        return [pattern for pattern in self.paths if fnmatchcase(path, pattern)]

    def selected_by(self, path: str) -> frozenset[str]:
        """Return the lanes that a change of this path selects; every lane if no pattern matches it.

        A file of tests selects its own lane, and what a row with its whole name says: rows of folders are for what the
        tests in them share.
        """
        rows = self.rows_of(path)
        if path.startswith("tests/") and path.rpartition("/")[2].startswith("test_"):
            rows = [row for row in rows if row == path]
            return frozenset({UNITS, self.of_test(path), *(lane for row in rows for lane in self.paths[row])})
        if not rows:
            return frozenset(self.purposes)
        return frozenset({UNITS, *(lane for row in rows for lane in self.paths[row])})

    def parse(self, words: Iterable[str]) -> frozenset[str]:
        """Return the lanes that a command line names; `full` stays as it is.

        Raises:
            BadTable: a lane that does not exist.
        """
        wanted = {word for word in words if word}
        if unknown := wanted - {*self.purposes, ALL, FULL}:
            names = ", ".join([*self.purposes, ALL, FULL])
            raise BadTable(f"no lane {', '.join(sorted(unknown))}; there are {names}")
        if wanted & {ALL, FULL}:
            wanted = {*self.purposes, *(wanted & {FULL})}
        return frozenset(wanted)

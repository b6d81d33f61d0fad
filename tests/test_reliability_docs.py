"""The pages of docs/reliability name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows() -> list[list[str]]:
    """Cells of the tables' rows, with an empty one before the first `|` and one after the last."""
    pages = sorted((ROOT / "docs/reliability").glob("*.md"))
    lines = "\n".join(page.read_text() for page in pages).splitlines()
    return [re.split(r"(?<!\\)\|", line) for line in lines if line.lstrip().startswith("|")]


def named_tests() -> list[tuple[str, str]]:
    """(file, test) of the tables' second column; the test is empty where a whole file is meant."""
    named = []
    for cells in rows():
        if cells[2].strip() in ("test", "---"):
            continue
        file = ""
        for reference in re.findall(r"[\w/.]*\.py(?:::\w+)?|::\w+", cells[2]):
            path, _, test = reference.partition("::")
            file = path or file
            named.append((file, test))
    return named


def test_every_test_that_is_named_exists() -> None:
    named = named_tests()
    assert len(named) > 100
    missing = []
    for file, test in named:
        path = ROOT / file
        defined = rf"^\s*(async )?(def|class) {test}|^{test} = "
        if not path.is_file() or not re.search(defined, path.read_text(), re.M):
            missing.append(f"{file}::{test}")
    assert not missing

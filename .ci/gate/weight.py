"""The weight of the product: modules, their lines, and the files that explain one request.

Refactorings must not raise the first two. The third counts the sources named in the table "The path of a request" of
docs/architecture.md: what a reader is sent to in order to follow one.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PACKAGES = ("protocol", "fetcher", "operator", "engine", "router", "batch", "cli")
TITLE = "## The path of a request"
_SOURCE = re.compile(r"[\w-]+\.(?:py|c|cpp|h)\b")


def modules(root: Path) -> list[Path]:
    """Return the Python files of the product that git knows."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--", *PACKAGES],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return [root / path for path in listed if path.endswith(".py") and (root / path).is_file()]


def path_of_a_request(architecture: str) -> set[str]:
    """Return the names of the sources in the rows of that table."""
    rows: set[str] = set()
    for line in architecture.partition(TITLE)[2].partition("\n## ")[0].splitlines():
        if line.startswith("|"):
            rows |= set(_SOURCE.findall(line))
    return rows


def report(root: Path) -> str:
    found = modules(root)
    lines = sum(path.read_bytes().count(b"\n") for path in found)
    named = path_of_a_request((root / "docs" / "architecture.md").read_text(encoding="utf-8"))
    return f"weight: {len(found)} modules, {lines} lines; the path of a request names {len(named)} files"

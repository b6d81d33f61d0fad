"""Flags that the documentation gives to our commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
_COMMAND = re.compile(r"(?:`|^\s*)argosy ([a-z]+)((?: [^`\n|&#]+)?)", re.MULTILINE)
_FLAG = re.compile(r"(?<!\S)(--[a-z][a-z-]*|-[a-z])(?=[\s=]|$)")


def shown() -> dict[str, set[str]]:
    """Command -> the flags that any page gives it."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for name, rest in _COMMAND.findall(page.read_text("utf-8")):
            command = " ".join(["bench", *rest.split()[:1]]) if name == "bench" else name
            found.setdefault(command, set()).update(_FLAG.findall(rest))
    return found


@pytest.mark.parametrize(("command", "flags"), sorted(shown().items()))
def test_flags_exist(command: str, flags: set[str]) -> None:
    assert command.split()[0] in {known.name for known in COMMANDS}
    asked = [sys.executable, "-P", "-m", "argosy", *command.split(), "--help"]
    text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert flags <= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))


def test_flags_are_found() -> None:
    found = shown()
    assert "--detach" in found["up"]
    assert {"--served-model-name"} <= found["serve"]
    assert sum(map(len, found.values())) > 10

"""Flags that the documentation gives to our commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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


def test_flags_exist() -> None:
    commands = shown()
    asked = [sys.executable, "-P", "-c", HELP_OF_EACH, *sorted(commands)]
    helps = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    known = {command: set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)) for command, text in helps.items()}
    unknown = {command: sorted(flags - known[command]) for command, flags in commands.items()}
    assert {command: flags for command, flags in unknown.items() if flags} == {}


HELP_OF_EACH = """
import contextlib, io, json, sys
from argosy.main import main

helps = {}
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as helps[command]:
        try:
            code = main([*command.split(), "--help"])
        except SystemExit as exit_:
            code = exit_.code
    assert not code, command
print(json.dumps({command: text.getvalue() for command, text in helps.items()}))
"""
"""In one process, which imports what the commands share once."""


def test_flags_are_found() -> None:
    found = shown()
    assert "--detach" in found["up"]
    assert {"--served-model-name"} <= found["serve"]
    assert sum(map(len, found.values())) > 10

"""kubectl, replaced by a program that answers from a table."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """\
#!{python}
import json, signal, sys
answers = json.load(open({answers!r}))
line = " ".join(sys.argv[1:])
for words, answer in answers.items():
    if words in line:
        if "error" in answer:
            sys.exit(answer["error"])
        sys.stdout.write(answer["text"] if "text" in answer else json.dumps(answer))
        sys.stdout.flush()
        if answer.get("stays"):
            signal.pause()
        sys.exit(0)
sys.exit("no answer for " + line)
"""


def fake_kubectl(folder: Path, answers: dict[str, dict[str, Any]]) -> str:
    """Write the program `kubectl` into a folder, and return its path. The first key that is part of its command line
    answers: an object as JSON, `{"text": ...}` as it is (`"stays": True` until it is ended), `{"error": ...}` fails."""
    (folder / "answers").write_text(json.dumps(answers))
    program = folder / "kubectl"
    program.write_text(_PROGRAM.format(python=sys.executable, answers=str(folder / "answers")))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)

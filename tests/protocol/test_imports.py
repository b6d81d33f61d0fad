"""The protocol's imports: light enough for every program."""

from __future__ import annotations

import subprocess
import sys


def test_the_protocol_imports_nothing_heavy() -> None:
    code = (
        "import sys, pkgutil, importlib, argosy_protocol as p\n"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(p.__path__, f'{p.__name__}.')]\n"
        "print([m for m in ('torch','transformers','fastapi','numpy','zmq','tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

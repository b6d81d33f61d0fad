"""Where tests keep what they install or build once per machine, named by a hash of what it is made from.

Each module that makes something runs as a program, too, which does it before tests begin:
`PYTHONPATH=tests/support python -m moto_server`.
"""

from __future__ import annotations

import os
from pathlib import Path


def prepared_files() -> Path:
    """The folder that ARGOSY_CI_CACHE names, or one in the user's cache."""
    given = os.environ.get("ARGOSY_CI_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "argosy" / "tests"

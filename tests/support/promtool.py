"""Prometheus' promtool, which tests alert rules."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from go_programs import built_program, find_go

SOURCES = Path(__file__).parent / "promtool_program"


def find_promtool() -> str | None:
    """Return the path that `ARGOSY_PROMTOOL` or PATH has, or else of one built from its Go module at the first call.

    None if there is no Go.

    `python -m promtool` does so before tests begin.
    """
    found = os.environ.get("ARGOSY_PROMTOOL") or shutil.which("promtool")
    go = find_go()
    if found or go is None:
        return found
    return str(built_program(go, SOURCES, "github.com/prometheus/prometheus/cmd/promtool"))


if __name__ == "__main__":
    print(find_promtool() or "there is no Go: the alert rules are not tested")

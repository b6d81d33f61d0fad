"""Writes the files: `python -m dashboards DIRECTORY`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from dashboards.alerts import rules
from dashboards.grafana import dashboard
from dashboards.promql import Registry

DASHBOARD = "router-dashboard.json"
RULES = "router-rules.yaml"


def render(registry: Registry) -> dict[str, str]:
    """The files, by name."""
    return {
        DASHBOARD: json.dumps(dashboard(registry), indent=1) + "\n",
        RULES: yaml.safe_dump(rules(registry), sort_keys=False, width=1000),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files into a directory."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for name, text in render(Registry.of_router()).items():
        (directory / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

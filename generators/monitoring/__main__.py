"""Write the dashboard and the rules: `python -m monitoring DIRECTORY`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from monitoring.alerts import rules
from monitoring.grafana import dashboard
from monitoring.promql import Registry

DASHBOARD = "router-dashboard.json"
RULES = "router-rules.yaml"


def render(registry: Registry) -> dict[str, str]:
    """Render the files: name -> text."""
    return {
        DASHBOARD: json.dumps(dashboard(registry), indent=1) + "\n",
        RULES: yaml.safe_dump(rules(registry), sort_keys=False, width=1000),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files into a directory."""
    parser = argparse.ArgumentParser(prog="python -m monitoring", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for name, text in render(Registry.of_router()).items():
        (directory / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

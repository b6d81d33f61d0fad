"""Write the dashboards and the rules: `python -m monitoring DIRECTORY`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from monitoring.alerts import alerts, rules
from monitoring.batch_views import batch_alerts, batch_rows
from monitoring.grafana import dashboard, router_dashboard
from monitoring.operator_views import MODELS, operator_alerts, operator_rows
from monitoring.promql import Registry

DASHBOARD = "router-dashboard.json"
RULES = "router-rules.yaml"
OPERATOR_DASHBOARD = "operator-dashboard.json"
OPERATOR_RULES = "operator-rules.yaml"


def render(registry: Registry) -> dict[str, str]:
    """Render the files: name -> text."""
    dashboards = {
        DASHBOARD: router_dashboard(registry, batch_rows()),
        OPERATOR_DASHBOARD: dashboard(
            "argosy-operator", "Argosy operator and engines", operator_rows(), MODELS
        ),
    }
    groups = {
        RULES: rules("argosy-router", [*alerts(registry), *batch_alerts()]),
        OPERATOR_RULES: rules("argosy-operator", operator_alerts()),
    }
    return {
        **{name: json.dumps(model, indent=1) + "\n" for name, model in dashboards.items()},
        **{name: yaml.safe_dump(spec, sort_keys=False, width=1000) for name, spec in groups.items()},
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

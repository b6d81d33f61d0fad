"""RBAC rules of the chart, read without Helm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

TEMPLATES = Path(__file__).parents[2] / "charts" / "argosy" / "templates"


def helper_rules(name: str) -> list[dict[str, Any]]:
    """A list of rules from the chart's helpers."""
    body = re.search(
        rf'define "{name}" -}}}}\n(.*?)\{{\{{- end', (TEMPLATES / "_helpers.tpl").read_text(), re.DOTALL
    )
    assert body is not None, name
    return _rules(body.group(1))


def fleet_rules(name: str) -> list[dict[str, Any]]:
    """The rules of a Role in the release's own namespace."""
    for document in (TEMPLATES / "rbac.yaml").read_text().split("\n---\n"):
        if f"kind: Role\nmetadata:\n  name: {name}\n" in document:
            return _rules(document.partition("\nrules:\n")[2])
    raise AssertionError(f"no Role {name}")


def _rules(text: str) -> list[dict[str, Any]]:
    found = yaml.safe_load(text)
    assert isinstance(found, list)
    return found

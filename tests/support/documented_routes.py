"""The endpoints that docs/api.md lists, to compare with OpenAPI documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def documented_operations(program: Literal["engine", "router"]) -> set[tuple[str, str]]:
    """Return methods and paths of the table's rows that the program has, without those of its own kind."""
    found: set[tuple[str, str]] = set()
    section = API.read_text().split("## Endpoints")[1].split("\n\n")[1]
    for row in section.splitlines()[2:]:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        is_there = cells[1 if program == "engine" else 2]
        if is_there == "no":
            continue
        methods: list[str] = []
        had_path = False
        only = re.findall(r"only `(\w+)`", is_there)
        for given in re.findall(r"`([^`]+)`", cells[0]):
            method, _, path = given.rpartition(" ")
            if not path.startswith("/"):
                method, path = path, ""
            if method:
                methods, had_path = ([method] if had_path else [*methods, method]), False
            if path:
                had_path = True
                template = re.sub(r"/(ID|NAME)\b", "/{name}", path)
                found |= {(template, each.lower()) for each in methods if not only or each in only}
    return {(path, method) for path, method in found if not path.startswith("/internal/")}


def operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    """Return paths and methods of an OpenAPI document."""
    return {(path, method) for path, methods in document["paths"].items() for method in methods}

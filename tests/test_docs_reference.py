"""docs/reference is up to date, and complete about environment variables."""

from __future__ import annotations

import re
from pathlib import Path

from docs_reference.__main__ import render
from docs_reference.chart import comments_of
from docs_reference.environment import VARIABLES
from docs_reference.weight_formats import with_table

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("protocol", "operator", "engine", "router", "batch", "cli", "fetcher")
VARIABLE = re.compile(r"""["']((?:ARGOSY_|POD_NAME)[A-Z_]*)["']""")


def test_pages_are_up_to_date() -> None:
    pages = render()
    others = {"gpu-kernels.md", "model-types.md"}  # of generators that take longer
    assert {path.name for path in REFERENCE.iterdir()} - others == set(pages)
    for name, text in pages.items():
        assert (REFERENCE / name).read_text("utf-8") == text, "run `make generate`"


def test_the_table_of_weight_formats_is_up_to_date() -> None:
    text = (ROOT / "docs" / "supported-models.md").read_text("utf-8")
    assert with_table(text) == text, "run `make generate`"


def test_every_environment_variable_is_documented_and_exists() -> None:
    read = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in VARIABLE.findall(path.read_text("utf-8"))
    }
    told = {name for variables in VARIABLES.values() for names in variables for name in names.split(", ")}
    assert read - told == set()
    assert {name for name in told if name.startswith(("ARGOSY_", "POD_"))} == read


def test_comments_of_values_belong_to_the_key_below_or_beside_them() -> None:
    values = """\
# Of the file.

# Who
# asks.
keys:
  # How many.
  count: 2
  name: ""   # none if empty
other: 1
"""
    assert comments_of(values) == {
        "keys": "Who asks.",
        "keys.count": "How many.",
        "keys.name": "none if empty",
    }

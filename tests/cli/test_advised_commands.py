"""Commands that messages and documents advise exist."""

from __future__ import annotations

import re
from pathlib import Path

from argosy.main import COMMANDS

ROOT = Path(__file__).parents[2]
ADVICE = sorted(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "examples/*",
        "charts/argosy/**/*.yaml",
        "charts/argosy/**/*.txt",
        "charts/argosy/**/*.json",
        "router/argosy_router/**/*.py",
        "operator/argosy_operator/**/*.py",
        "operator/argosy_resource/**/*.py",
        "engine/argosy_engine/**/*.py",
        "cli/argosy/**/*.py",
        "fetcher/argosy_fetcher/**/*.py",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path.parent.name not in ("decisions", "log")  # these describe the past
)
KUBECTL = {
    "annotate", "api-resources", "apply", "config", "cordon", "create", "debug", "delete", "describe", "drain",
    "edit", "events", "exec", "argosy", "explain", "get", "kustomize", "label", "logs", "patch", "port-forward",
    "rollout", "scale", "set", "top", "uncordon", "wait",
}  # fmt: skip
_ARGOSY = re.compile(r"(?:`|^\s*\$?\s*)argosy ([a-z][a-z-]*)(?=[\s`])", re.MULTILINE)
_KUBECTL = re.compile(
    r"(?:`|^\s*\$?\s*|\$\()kubectl ((?:--?[a-z-]+(?: |=)\S+ )*)([a-z][a-z-]*)(?=[\s`])", re.MULTILINE
)


def advised(text: str) -> set[str]:
    """Commands of ours that a text names in backticks, or at the beginning of a line."""
    return set(_ARGOSY.findall(text))


def test_advised_commands_exist() -> None:
    ours = {command.name for command in COMMANDS}
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ADVICE}
    unknown = {
        name: (advised(text) - ours)
        | {f"kubectl {verb}" for _, verb in _KUBECTL.findall(text) if verb not in KUBECTL}
        for name, text in texts.items()
    }
    assert {name: commands for name, commands in unknown.items() if commands} == {}


def test_advice_is_found() -> None:
    assert advised("ask `argosy why NAME`\n  argosy up -f x\nand argosy is good") == {"why", "up"}
    found = {command for path in ADVICE for command in advised(path.read_text(encoding="utf-8"))}
    assert len(found) > 5

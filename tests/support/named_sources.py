"""Sources in memory for programs that open them by a URI: after `serve_names`, what is published here is the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from argosy_fetcher.errors import ModelNotFound
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.registry import SOURCES
from scripted_source import ScriptedSource

TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
PUBLISHED: dict[str, ScriptedSource | Exception] = {}
"""ORG/NAME, or ORG/NAME@REVISION, -> its source, or what opening it raises."""


def open_named(uri: SourceUri, credentials: Mapping[str, str]) -> ScriptedSource:
    """Take the place of a source's class in the registry."""
    found = PUBLISHED.get(f"{uri.location}@{uri.revision}") or PUBLISHED.get(uri.location)
    if found is None:
        raise ModelNotFound(f"{uri}: no such repository; check the name")
    if isinstance(found, Exception):
        raise found
    found.requested_revision = uri.revision
    return found


def serve_names(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """Make `hf://` read what is published, and keep models in `store`, until the test ends."""
    PUBLISHED.clear()
    monkeypatch.setitem(SOURCES, "hf", f"{__name__}:{open_named.__name__}")
    monkeypatch.setenv("ARGOSY_MODELS_DIR", str(store))
    for name in ("ARGOSY_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "ARGOSY_CREDENTIALS_DIR"):
        monkeypatch.delenv(name, raising=False)


def publish_tiny(location: str, **config: Any) -> ScriptedSource:
    """Publish the model that ships under another name.

    Args:
        config: fields of config.json to change.
    """
    files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), **config}).encode()
    source = ScriptedSource(files, name=f"hf://{location}", chunk_bytes=64 << 10)
    PUBLISHED[location] = source
    return source

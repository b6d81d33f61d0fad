"""Fetch check: refuses a model that the engine does not serve, before its weights are fetched or a replica is started.

Owns the translation of the engine's refusals for the fetcher and the command line. Must not know torch, which the
command line does not import.
"""

from __future__ import annotations

from typing import Any

from argosy_engine.errors import ConfigError
from argosy_engine.models.config_file import check_config, load_model_config
from argosy_engine.models.folder_check import check_folder
from argosy_engine.models.model_path import resolve_model
from argosy_fetcher.errors import UnsupportedModel


def check_fetched_config(source: str, config: dict[str, Any]) -> None:
    """Check the content of a config.json.

    Args:
        source: the model's name, for the message.

    Raises:
        UnsupportedModel: the engine does not serve such a model.
    """
    try:
        check_config(config)
    except ConfigError as error:
        raise UnsupportedModel(f"{source}: config.json: {error}") from None


def check_local_model(source: str) -> None:
    """Check a model that is on this machine: its config.json, and that tokenizer and weights are there and whole.

    Args:
        source: `file://PATH`, a path or `builtin://NAME`.

    Raises:
        UnsupportedModel: the engine could not load it.
    """
    try:
        path = resolve_model(source)
        load_model_config(path)
        check_folder(path)
    except ConfigError as error:
        raise UnsupportedModel(str(error)) from None

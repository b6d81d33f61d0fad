"""Fetch check: refuses a model that the engine does not serve, before its weights are fetched.

Owns the translation of the engine's refusals for the fetcher. Must not know torch: the command line uses it, too.
"""

from __future__ import annotations

from typing import Any

from argosy_engine.errors import ConfigError
from argosy_engine.models.config_file import check_config
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

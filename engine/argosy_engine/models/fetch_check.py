"""Fetch check: refuses a model that the engine does not serve, or not in the layout that is asked for, before its
weights are fetched or a replica is started.

Owns the translation of the engine's refusals for the fetcher and the command line. Must not know torch, which the
command line does not import.
"""

from __future__ import annotations

from typing import Any

from argosy_engine.checkpoint.folder_check import check_folder
from argosy_engine.checkpoint.model_path import resolve_model
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_use import AS_IT_IS, ModelUse
from argosy_engine.model_configs.sharding import check_tensor_parallel
from argosy_engine.model_configs.stage import check_pipeline_parallel
from argosy_engine.models.config_file import check_config, load_model_config
from argosy_fetcher.errors import UnsupportedModel


def check_fetched_config(
    source: str,
    config: dict[str, Any],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    expert: bool = False,
    use: ModelUse = AS_IT_IS,
) -> None:
    """Check the content of a config.json, and that the model can be divided among the devices.

    Args:
        source: the model's name, for the message.
        tensor: `--tensor-parallel-size`; the others are those of `--pipeline-parallel-size`, `--data-parallel-size`
            and `--enable-expert-parallel`.
        use: see `check_config`.

    Raises:
        UnsupportedModel: the engine does not serve such a model.
    """
    try:
        model = check_config(config, use)
        check_tensor_parallel(model, tensor, expert, data)
        check_pipeline_parallel(model, pipeline)
    except ConfigError as error:
        raise UnsupportedModel(f"{source}: config.json: {error}") from None


def check_local_model(
    source: str, *, tensor: int = 1, pipeline: int = 1, data: int = 1, expert: bool = False
) -> None:
    """Check a model that is on this machine: its config.json, that it can be divided among the devices, and that
    tokenizer and weights are there and whole.

    Args:
        source: `file://PATH`, a path or `builtin://NAME`.
        tensor, pipeline, data, expert: see `check_fetched_config`.

    Raises:
        UnsupportedModel: the engine could not load it.
    """
    try:
        path = resolve_model(source)
        config = load_model_config(path, None)  # flags, which are not known here, may say how it pools
        check_tensor_parallel(config, tensor, expert, data)
        check_pipeline_parallel(config, pipeline)
        check_folder(path)
    except ConfigError as error:
        raise UnsupportedModel(str(error)) from None

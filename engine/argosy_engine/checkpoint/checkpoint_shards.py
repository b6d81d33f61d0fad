"""Lists the files of a checkpoint. Opens only the index, and does not import torch."""

from __future__ import annotations

from pathlib import Path

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import read_json

_MAX_NAME_BYTES = 255
"""What a file system takes as a file's name."""
_MAX_SHOWN = 128
"""Characters of a malformed name that an error message shows."""


def checkpoint_shards(path: Path) -> dict[Path, set[str] | None]:
    """Return the checkpoint's safetensors files, each with the tensors that the index lists for it.

    Without an index there is one file, and None in place of the names: all its tensors count.

    Raises:
        ConfigError: there is no checkpoint in directory `path`, or its index is malformed.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if not index.is_file():
        if single.is_file():
            return {single: None}
        raise ConfigError(
            f"{path} has no model.safetensors; other weight formats are not loaded, because they can carry code"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        # A shard is a file next to its index; anything else could read outside the checkpoint.
        if not isinstance(name, str) or not _is_shard_name(name):
            shown = (
                repr(name[:_MAX_SHOWN]) if isinstance(name, str) else "a file by something else than a text"
            )
            raise ConfigError(
                f"{index} names {shown}; shards are .safetensors files in its own folder, with printable names of at "
                f"most {_MAX_NAME_BYTES} bytes"
            )
        shards.setdefault(path / name, set()).add(tensor)
    return dict(shards)


def _is_shard_name(name: str) -> bool:
    return (
        name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and Path(name).name == name
        and name.endswith(".safetensors")
    )

"""Which files a checkpoint consists of. No torch; no file but the index is opened."""

from __future__ import annotations

from pathlib import Path

from argosy_engine.errors import ConfigError
from argosy_engine.models.config import read_json


def checkpoint_shards(path: Path) -> dict[Path, set[str] | None]:
    """Safetensors file -> the tensors that the index seeks in it; None where there is no index: all that it has.

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
        # A shard is a file beside its index; anything else would read outside of the checkpoint.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index} names {name!r}; shards are .safetensors files in its own folder")
        shards.setdefault(path / name, set()).add(tensor)
    return dict(shards)

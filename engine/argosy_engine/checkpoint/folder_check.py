"""Folder check: which files of a model's folder are missing or damaged, found without reading the weights.

Owns the faults that names, sizes and headers show. Must not know torch: `argosy doctor` and the command line use it.
Whether the tensors fit config.json is checked by a load (`weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from argosy_engine.checkpoint.checkpoint_shards import checkpoint_shards
from argosy_engine.checkpoint.safetensors_header import read_header
from argosy_engine.checkpoint.tokenizer_files import TokenizerMode, prepare_tokenizer
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.file_permission import permission_fault
from argosy_fetcher.progress_display import printable
from argosy_fetcher.selection import TOKENIZER

_MAX_NAMED = 6
"""Files that an error message lists, and tensors of a file."""
_MAX_NAME = 128
"""Characters of a tensor's name that an error message shows."""


def check_folder(
    path: Path,
    *,
    has_tokenizer: bool = True,
    has_weights: bool = True,
    tokenizer: Path | None = None,
    tokenizer_mode: TokenizerMode = "auto",
) -> None:
    """Check that the files of the model in directory `path` are there and whole.

    Args:
        has_tokenizer: whether the tokenizer has to be there. One that is no tokenizer.json is converted, which takes
            seconds.
        tokenizer: its directory, if it is another (`--tokenizer`).
        has_weights: whether the weights have to be there.

    Raises:
        ConfigError: files are missing or damaged; the message names them.
    """
    faults = [
        *(_tokenizer_faults(tokenizer or path, tokenizer_mode) if has_tokenizer else ()),
        *(_weight_faults(path) if has_weights else ()),
    ]
    if faults:
        more = len(faults) - _MAX_NAMED
        text = "; ".join(faults[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ConfigError(f"the model in {path} cannot be loaded: {text}")


def _tokenizer_faults(path: Path, mode: TokenizerMode) -> Iterator[str]:
    try:
        prepared = prepare_tokenizer(path, mode)
    except PermissionError:
        yield f"the tokenizer: {permission_fault(path)}"
        return
    except ConfigError as error:
        yield str(error).replace(f"{path} has", "it has")
        return
    file = prepared.folder / TOKENIZER
    try:
        msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    except PermissionError:
        yield f"{TOKENIZER}: {permission_fault(path)}"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield f"{TOKENIZER} is damaged ({error}); copy it again"


def _weight_faults(path: Path) -> Iterator[str]:
    try:
        shards = checkpoint_shards(path)
    except ConfigError as error:
        yield str(error).replace(f"{path} has", "it has")
        return
    for file, wanted in sorted(shards.items()):
        if fault := _file_fault(file, wanted or set()):
            yield fault


def _file_fault(file: Path, wanted: set[str]) -> str:
    """What is wrong with a file of weights; empty if nothing is.

    Args:
        wanted: the tensors that the index lists for it.
    """
    if not file.is_file():
        return f"{file.name} is missing; copy it again"
    try:
        file.open("rb").close()
    except PermissionError:
        return f"{file.name}: {permission_fault(file.parent)}"
    try:
        start, tensors = read_header(file)
    except ConfigError as error:
        return f"{file.name} is cut off or damaged, copy it again ({str(error).replace(f'{file}: ', '')})"
    size, whole = (
        file.stat().st_size,
        start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0),
    )
    if size != whole:
        return f"{file.name} has {size} bytes instead of {whole}; copy it again"
    if missing := sorted(wanted - tensors.keys()):
        more = len(missing) - _MAX_NAMED
        names = ", ".join(printable(name[:_MAX_NAME]) for name in missing[:_MAX_NAMED])
        names += f" and {more} more" if more > 0 else ""
        return f"{file.name} lacks tensors that the index lists ({names}); copy it and the index again"
    return ""
